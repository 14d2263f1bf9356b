"""Weight layouts: which boxes of which tensors each rank holds or needs, and where ranks run."""
