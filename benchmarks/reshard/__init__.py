"""Benchmark of the weight-sync strategies and megatron-core's resharding on real ranks."""
