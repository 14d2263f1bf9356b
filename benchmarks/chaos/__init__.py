"""Kills processes of a training run and compares its result bitwise with an undisturbed run."""
