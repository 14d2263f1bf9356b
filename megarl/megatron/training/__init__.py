"""The training step on one rank: trainer, losses, update guard, metrics."""
