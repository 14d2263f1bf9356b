"""NeMo-RL: reading of its YAML files and launch scripts, and the tables of its keys."""
