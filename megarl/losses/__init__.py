"""Losses over packed tokens, as callable dataclasses: policies, critics, SFT, preferences, implicit reward models."""
