"""Rollouts: engines, the pool that balances load over them, and the worker that runs agents and scores groups."""
