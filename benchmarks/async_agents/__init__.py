"""Asynchronous against synchronous steps of an agent whose tool makes it wait."""
