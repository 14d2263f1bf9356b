"""Agents: async functions that turn a prompt and an engine into one trajectory."""
