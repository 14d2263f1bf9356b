"""Schedules of rollouts and training steps as one state machine: pure, without I/O, clock or processes."""
