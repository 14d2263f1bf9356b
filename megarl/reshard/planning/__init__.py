"""Sync planning: which rank sends which box to which rank, round by round."""
