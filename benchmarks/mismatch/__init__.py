"""Difference between the log-probabilities of trainer and engine without a defect, by recipe and model family."""
