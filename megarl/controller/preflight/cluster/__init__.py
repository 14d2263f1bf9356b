"""Checks of the nodes of a Ray cluster, and of the connections between them, before a run starts."""
