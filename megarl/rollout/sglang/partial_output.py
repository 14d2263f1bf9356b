"""What SGLang knows of an unfinished request: its tokens, their log-probabilities, and the version of each.

scheduler --- every 50 tokens of a request ---> tokenizer manager (the engine's host): tokens, log-probabilities
          --- from here on also ------------->  the spans of versions, which SGLang sends with the last tokens only

So the host can report unfinished requests without any call to the scheduler, and after its death.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.rollout.engine import UNFINISHED, Generation

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import ReqState

SPANS = "megarl_policy_version_spans"
"""Name of the spans in SGLang's custom information of a request."""

Span = tuple[int, int, int]
"""A policy version, and the first and last + 1 index of tokens that it has sampled."""


def send_versions_with_partial_outputs() -> None:
    """Have SGLang send the spans of versions with the tokens of unfinished requests; for scheduler processes."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    class OutputStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Span]]]:
            """Return the spans of all tokens sent so far, for each request; nothing if all have finished."""
            if all(req.finished() for req in reqs):
                return {}
            version = get_serving().weight_version
            return {SPANS: [[] if req.finished() else _spans_of(req, version) for req in reqs]}

    def _spans_of(req: Req, version: str) -> list[Span]:
        spans = compute_weight_version_spans(
            req.weight_version_events, current_version=version, num_output_tokens=req.send_token_offset
        )
        return [(int(span.version), span.start, span.end) for span in spans]

    Scheduler.get_output_streamer_class = lambda _: OutputStreamer


def count_partial_tokens(state: ReqState | None) -> int:
    """Return the number of tokens that `read_partial_output` returns."""
    spans: list[Span] = [] if state is None else state.customized_info_accumulated.get(SPANS, [])
    return spans[-1][2] if spans else 0


def read_partial_output(state: ReqState | None) -> Generation:
    """Return the tokens of an unfinished request that have reached the tokenizer manager.

    Args:
        state: of the request; None if SGLang does not have it.
    """
    spans: list[Span] = [] if state is None else state.customized_info_accumulated.get(SPANS, [])
    num = count_partial_tokens(state)
    sampled: list[Any] = state.output_token_logprobs[:num] if state is not None else []
    versions = np.full(num, -1, np.int32)
    for version, start, end in spans:  # each message repeats those before it
        versions[start:end] = version
    assert len(sampled) == num, f"{len(sampled)} tokens, versions of {num}"
    return Generation(
        token_ids=np.array([token for _, token, *_ in sampled], np.int32),
        logprobs=np.array([logprob for logprob, *_ in sampled], np.float32),
        policy_versions=versions,
        finish_reason=UNFINISHED,
    )
