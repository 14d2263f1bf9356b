"""Benchmarks of megarl; each package is a command, `python -m benchmarks.<name>`."""
