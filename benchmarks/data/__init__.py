"""Measures the CPU time and memory of checking a large data file, and compares the order of prompts after a stop."""
