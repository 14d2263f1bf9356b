"""Megatron-core trainer workers: the messages that they exchange with the controller, and their worker classes."""
