"""CPU time and memory of the controller in steps of many ranks and trajectories."""
