"""What the gateway adds to a turn, and the memory of many sessions."""
