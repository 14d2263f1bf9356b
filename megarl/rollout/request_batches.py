"""Requests that reach an engine together, and whose completions leave it as they finish."""

from __future__ import annotations

from megarl.rollout.engine import Generation, GenerationRequest
from megarl.workers.call_batches import CallBatches

RequestBatches = CallBatches[GenerationRequest, Generation]
"""The batches in progress on one engine."""
