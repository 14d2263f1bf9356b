"""Handles through which the controller calls remote trainer ranks, engines and rollout workers."""
