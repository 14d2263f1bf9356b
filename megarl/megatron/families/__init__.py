"""Supported Hugging Face model families and the mapping between their tensors and megatron-core parameters."""
