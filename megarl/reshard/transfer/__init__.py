"""Transfer of weights: process groups, transports, buckets, sinks and the executor of a plan."""
