"""Analysis of a sync without running it: bytes, messages and memory of each strategy."""
