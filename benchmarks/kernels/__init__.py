"""Measures the ops of megarl_kernels, and the memory of the language model's head."""
