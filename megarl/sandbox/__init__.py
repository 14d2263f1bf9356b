"""Runs untrusted Python programs where they reach neither files, network, processes nor hidden answers of the host."""
