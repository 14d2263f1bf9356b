"""Tokenized prompts and trajectories, and the routes of their tokens to experts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Routes = np.ndarray
"""uint8 or uint16 [n, L, k]: the k experts of each of n tokens in each of L layers with experts; those of a token are k
times the same where they are not known."""

ROUTES = "routes"
"""Column of a request with routes instead of numbers; it is not an input of losses."""


def route_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """Return the type of routes of a model with this many experts per layer."""
    return np.uint8 if num_experts <= 256 else np.uint16


def join_routes(first: Routes | None, rest: Routes | None) -> Routes | None:
    """Return the routes of tokens and of those that follow them; None: of no tokens."""
    if first is None or rest is None:
        return rest if first is None else first
    return np.concatenate([first, rest])


def fit_routes(routes: Routes | None, num_tokens: int) -> Routes | None:
    """Return the routes of exactly this many tokens: those of others are left out, and unknown ones are zeros."""
    if routes is None:
        return None
    out = np.zeros((num_tokens, *routes.shape[1:]), routes.dtype)
    known = routes[:num_tokens]
    out[: len(known)] = known
    return out


def is_routed(routes: Routes) -> np.ndarray:
    """Return which tokens have routes in all layers, bool [n]."""
    known: np.ndarray = (routes[..., 0] != routes[..., 1]).all(axis=1)
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoutes:
    """How an engine returns the routes of a model: int32, of all layers."""

    num_layers: int
    layers: tuple[int, ...]
    """Indices, from 0, of the L layers with experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, has_experts: Sequence[bool], *, top_k: int, num_experts: int) -> EngineRoutes:
        """Return the form for a model; `has_experts`: of each layer."""
        layers = tuple(layer for layer, has in enumerate(has_experts) if has)
        return cls(num_layers=len(has_experts), layers=layers, top_k=top_k, num_experts=num_experts)

    def decode(self, encoded: str) -> Routes:
        """Return the routes of an answer of SGLang, `meta_info["routed_experts"]`; negative numbers are no experts."""
        found = np.frombuffer(base64.b64decode(encoded), np.int32).reshape(-1, self.num_layers, self.top_k)
        own = found[:, list(self.layers)]
        return np.where((own < 0).any(axis=(1, 2), keepdims=True), 0, own).astype(route_dtype(self.num_experts))


MAX_REWARD = 1e18
"""Largest magnitude of a reward; sums and squares of such numbers are finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sequence of T tokens of an episode: prompt, sampled tokens and tool output, in order.

    An episode is one trajectory, as long as each prompt continues the tokens before it. Where the next prompt does not,
    as with a chat template that rewrites earlier turns, the episode continues in another trajectory, its next segment.
    Rewards are those of the episode, the same in all of its segments.

    Arrays rather than lists, so that they are transferred between processes through shared memory without a copy.

    Examples:
        >>> trajectory = Trajectory(
        ...     prompt_id="train.jsonl:1",
        ...     group_id=0,
        ...     token_ids=np.array([5, 6, 7, 2], np.int32),
        ...     loss_mask=np.array([False, False, True, True]),
        ...     logprobs=np.array([0.0, 0.0, -0.5, -0.25], np.float32),
        ...     policy_versions=np.array([-1, -1, 3, 3], np.int32),
        ... )
        >>> trajectory.num_tokens, trajectory.prompt_length
        (4, 2)
    """

    prompt_id: str
    """Identifier of the prompt's row in its data source."""

    group_id: int
    """Index shared by the completions of the same prompt in the same step."""

    token_ids: NDArray[np.int32]
    """[T]: ids of all tokens of the episode."""

    loss_mask: NDArray[np.bool_]
    """[T]: True for tokens that the policy sampled, False for prompt and tool output."""

    logprobs: NDArray[np.float32]
    """[T]: log-probabilities from the rollout engine; 0.0 where loss_mask is False."""

    policy_versions: NDArray[np.int32]
    """[T]: version of the weights that sampled each token (weights may be updated mid-sequence); -1 where loss_mask is
    False."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward term -> value, before weighting; `<term>/<name>` -> further value of a term, which is only logged."""

    reward: float = 0.0
    """Total reward, which the controller sums up from `rewards` with the weights of a step; 0 before, and if it is
    dropped."""

    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Reward term -> error message, for terms that failed on this completion (`on_error: drop`). If there are any, the
    completion is dropped: it takes no part in estimates, metrics and training."""

    finish_reason: str = "stop"
    """`stop`: ended by the policy or the environment; `length` (tokens), `turns`, `seconds`, `calls`: truncated at this
    limit; `refused`: ended by a text that the chat template does not take."""

    segment: int = 0
    """Index of this sequence among those of its episode; 0 begins an episode."""

    turn_rewards: tuple[float, ...] = ()
    """Reward that the environment gave for each turn, before weighting: one value per run of sampled tokens. Empty:
    none."""

    routes: Routes | None = None
    """[T, L, k]: experts to which the engine has sent each token; None: not recorded, as for models without experts."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions"):
            got = len(getattr(self, name))
            assert got == n, f"{name} has length {got}, token_ids {n}"
        assert self.routes is None or len(self.routes) == n, f"routes has length {len(self.routes)}, token_ids {n}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.token_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one; T if none was sampled."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else self.num_tokens


TIME_LIMIT: Final = "seconds"
"""Value of `finish_reason` of an episode that reached a time limit, and of a request that this has ended."""

TRUNCATED_REASONS = ("length", "turns", TIME_LIMIT, "calls")
"""Values of `finish_reason` of an episode that reached a limit."""


def split_episodes(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the segments of each episode; those of an episode follow one another."""
    episodes: list[list[Trajectory]] = []
    for trajectory in trajectories:
        if trajectory.segment == 0:
            episodes.append([])
        assert trajectory.segment == len(episodes[-1]), f"{trajectory.prompt_id}: segment {trajectory.segment}"
        episodes[-1].append(trajectory)
    return episodes


def join_segments(segments: Sequence[Trajectory]) -> Trajectory:
    """Return the segments of an episode as one sequence, to be read as a whole and not to be trained on."""
    if len(segments) == 1:
        return segments[0]
    return replace(
        segments[-1],
        segment=0,
        routes=None,
        token_ids=np.concatenate([segment.token_ids for segment in segments]),
        loss_mask=np.concatenate([segment.loss_mask for segment in segments]),
        logprobs=np.concatenate([segment.logprobs for segment in segments]),
        policy_versions=np.concatenate([segment.policy_versions for segment in segments]),
        turn_rewards=tuple(reward for each in segments for reward in each.turn_rewards or _no_rewards(each))
        if any(segment.turn_rewards for segment in segments)
        else (),
    )


def _no_rewards(segment: Trajectory) -> tuple[float, ...]:
    return (0.0,) * count_turns(segment.loss_mask)


def count_turns(loss_mask: NDArray[np.bool_]) -> int:
    """Return the number of runs of sampled tokens of a trajectory."""
    return int(np.count_nonzero(loss_mask[1:] & ~loss_mask[:-1])) + int(len(loss_mask) > 0 and bool(loss_mask[0]))


def find_mixed_kv(loss_mask_T: NDArray[np.bool_], policy_versions_T: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which tokens were sampled after a push within their request, [T].

    If the push was in place, older weights have computed part of the KV cache that they were sampled with. A request is
    taken to be a sequence of sampled tokens without others between them.
    """
    sampled_T = np.flatnonzero(loss_mask_T)
    is_first = np.diff(sampled_T, prepend=-2) > 1
    start_versions = policy_versions_T[sampled_T[is_first]]
    mixed_T = np.zeros(len(loss_mask_T), np.bool_)
    if len(sampled_T):
        mixed_T[sampled_T] = policy_versions_T[sampled_T] != start_versions[np.cumsum(is_first) - 1]
    return mixed_T


def count_routed(trajectory: Trajectory) -> tuple[int, int]:
    """Return how many tokens have a route, and how many tokens there are, before the last trained token."""
    trained_T = np.flatnonzero(trajectory.loss_mask)
    num = int(trained_T[-1]) if len(trained_T) else 0
    return (0 if trajectory.routes is None else int(is_routed(trajectory.routes[:num]).sum())), num


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class Prompt:
    """A tokenized row of a data source.

    Examples:
        >>> prompt = Prompt(
        ...     prompt_id="train.jsonl:1",
        ...     text="Q: What is 6 * 7?",
        ...     token_ids=(5, 6),
        ...     row={"question": "What is 6 * 7?", "answer": "42"},
        ...     answer="42",
        ... )
        >>> prompt.row["question"]
        'What is 6 * 7?'
    """

    prompt_id: str
    """`<file name>:<row number from 1>`."""

    text: str
    """The tokenized text, with the template applied."""

    token_ids: tuple[int, ...]

    row: Mapping[str, Any]
    """The row as read, for reward functions."""

    answer: str | None = None
    """Reference answer, if the row has one."""

    other_answers: tuple[str, ...] = ()
    """Further reference answers, if the row has a list of them; a completion needs to give one of all."""

    source: str = ""
    """Name of its source; empty in a run with one data file."""

    reward_terms: tuple[str, ...] | None = None
    """Names of the rules that score its completions; None: all."""

    max_new_tokens: int | None = None
    """Limit of its source for completions, in tokens; None: that of the run."""

    @property
    def answers(self) -> tuple[str, ...]:
        """All reference answers, each of which is right; empty if the row has none."""
        return () if self.answer is None else (self.answer, *self.other_answers)


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
class TermReport:
    """How one reward term was computed on the completions of a group."""

    seconds: float
    """Time from the call of the term to its last value, calls after a failure included."""
    num_retried: int
    """Number of completions on which the first call failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The completions of a prompt with their rewards."""

    trajectories: list[Trajectory]
    terms: Mapping[str, TermReport] = field(default_factory=dict)
    """By name of the term."""
