"""Tests of the commands of `megarl`."""
