"""Measures starts of `megarl train` from the command to the first completion."""
