"""Tests of the weight-sync strategies on real ranks."""
