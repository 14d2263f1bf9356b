"""Agents: functions that turn an episode's prompt into a trajectory, with an engine that samples for them."""
