"""megatron-core models: config, layer specs, packed sequences, forward and backward passes."""
