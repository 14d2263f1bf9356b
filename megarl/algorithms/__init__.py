"""RL algorithms: one module per training loop and its advantage estimator."""
