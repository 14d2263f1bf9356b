"""Compares the vectorized generalized advantage estimation with loops."""
