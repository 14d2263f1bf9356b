"""Rewards of generated programs by test cases: programs run in a sandbox, their outputs are compared here."""
