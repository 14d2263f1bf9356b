"""Advantage estimation: what estimators are given and return, and how rollout workers share the groups of a step."""
