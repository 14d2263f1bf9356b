"""Rewards that services compute: the client that they share, the terms `http` and `judge`."""
