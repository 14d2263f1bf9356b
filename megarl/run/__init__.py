"""State, metrics, checkpoints and the step interface of one run, used by the training loops."""
