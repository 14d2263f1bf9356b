"""The commands of `megarl`."""
