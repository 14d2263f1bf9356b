"""Bytes of device memory by owner, computed from a configuration, and a ledger that adds them up phase by phase."""
