"""Rewards computed from a trajectory: rules for answers and formats, and Python functions of the user."""
