"""Environments that talk with the policy in messages: the interface, the agent that runs them, and two that ship."""
