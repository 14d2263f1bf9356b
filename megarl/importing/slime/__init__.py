"""slime: reading of its launch scripts, and the table of its arguments."""
