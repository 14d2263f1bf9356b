"""Placement of ranks: cluster nodes, hardware, slot pools, the parallel rank grid and network interfaces."""
