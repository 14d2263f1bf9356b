"""Adaptations for SGLang's CPU engine: attention, determinism and shared prefills as a GPU engine has them."""
