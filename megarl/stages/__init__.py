"""Training stages without engines: supervised fine-tuning, reward models, direct preference optimization."""
