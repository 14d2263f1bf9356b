"""Tests of sync plans: simulated, at scale, and between disaggregated processes."""
