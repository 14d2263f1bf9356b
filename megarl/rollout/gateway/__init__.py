"""An OpenAI-compatible endpoint inside a rollout worker, for agents that are programs of their own."""
