"""Weights in Hugging Face terms: a rank's layout, loading and exporting model folders, weight sync to engines."""
