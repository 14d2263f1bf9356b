"""The driver and the controller actor: start, watch, resume and recover a run."""
