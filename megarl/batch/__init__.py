"""Trajectories, load balancing, and packing into micro-batches."""
