"""Tests of `megarl.config.algorithms`."""
