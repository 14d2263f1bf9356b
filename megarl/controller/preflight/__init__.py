"""Checks of a configuration before any worker starts."""
