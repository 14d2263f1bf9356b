"""Measures how long saving a checkpoint stalls training."""
