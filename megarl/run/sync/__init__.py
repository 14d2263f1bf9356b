"""Weight sync: the policy's weights on their way from the trainer to the engines."""
