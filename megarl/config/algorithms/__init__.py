"""Configuration of the RL algorithms: one file per family, united in `algorithm`."""
