"""Tests of `megarl.config`."""
