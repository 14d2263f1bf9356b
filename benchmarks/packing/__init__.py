"""Compares algorithms that pack sequences into micro-batches."""
