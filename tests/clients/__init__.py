"""Scripts for other people's frameworks, and a command that runs them against the gateway."""
