"""Rollouts: agents and environments, the worker that runs them and scores groups, advantage estimation."""
