"""`megarl launch`: joins several nodes into one Ray cluster and runs a command on it."""
