"""Compares the vectorized generalized advantage estimation with Python loops."""
