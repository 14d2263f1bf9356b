"""megarl: reinforcement learning for language models on Megatron-core and SGLang."""

__version__ = "0.1.0"
