"""Operating-system processes: signals, children, stacks, log files, startup times, atomic file writes."""
