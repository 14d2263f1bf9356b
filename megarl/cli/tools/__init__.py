"""Tools that start no training run: convert checkpoints, score token files, explain weight syncs."""
