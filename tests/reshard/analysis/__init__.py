"""Tests of the traffic analysis and the sync reports."""
