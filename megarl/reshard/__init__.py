"""Weight resharding: moves weights from the trainer's parallel layout to the engines' layout."""
