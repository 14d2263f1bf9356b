"""Checkpoints of a run on disk: manifest, atomic save, verification, retention, and the run lock."""
