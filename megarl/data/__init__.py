"""Data files: prompts, demonstrations and preference pairs; tokenizers, the sampler and demo data."""
