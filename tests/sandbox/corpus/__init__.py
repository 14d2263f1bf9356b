"""Hostile programs and forgeries that every kind of sandbox has to contain: `python -m tests.sandbox.corpus`."""
