"""Tests of weight resharding, with synthetic layouts and a simulator of plans."""
