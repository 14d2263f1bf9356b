"""Checkpoints in megatron-core's distributed format: model weights, and the full training state of a rank."""
