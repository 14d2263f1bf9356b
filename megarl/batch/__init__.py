"""Trajectories, and how they become packed micro-batches."""
