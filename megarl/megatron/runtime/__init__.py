"""Process-level support for megatron-core: platform, patches, process groups, RNG states, offloading."""
