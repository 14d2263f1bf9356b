"""What runs a run: process tools, placement on nodes, the launch of a Ray cluster, and worker groups."""
