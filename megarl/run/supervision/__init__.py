"""Failure detection and recovery limits of a run: engine supervision, liveness probes, restarts, timeouts."""
