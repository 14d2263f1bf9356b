"""Measures the time of a program in a sandbox, and what is left afterwards."""
