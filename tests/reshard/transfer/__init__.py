"""Tests of buckets, transports, the executor and its failures."""
