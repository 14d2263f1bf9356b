"""verl: reading of its launch scripts and Hydra configurations, and the table of its keys."""
