"""Tests of weight layouts and of the placement of engine ranks."""
