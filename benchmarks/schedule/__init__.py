"""Step time, staleness and waste of schedules: simulated, and with processes that sleep."""
