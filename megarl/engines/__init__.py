"""Rollout engines: the interface, the pool in which rollout workers use them, and SGLang."""
