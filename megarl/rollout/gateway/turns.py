"""The turns of a session as a tree, and the token sequences that it is trained on.

turn 0   prompt 0 | output 0
turn 1             '- given 1 | output 1            the first turn after another continues its sequence
turn 2             '- given 2 | output 2            a second one has a sequence of its own: prompt 0, output 0 and
                                                    given 2 are its prompt, of which nothing is trained on again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.rollout.engine import Generation
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.history import Exchange
from megarl.rollout.gateway.reply_parser import ParsedReply


class TokenSequence:
    """Token ids that turns continue one after the other, in one list."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.last: Turn | None = None
        """The turn that continues it last."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One request of the policy and its answer."""

    number: int
    """Counts the turns of a session from 0, in the order of their requests."""
    parent: Turn | None
    """The turn whose tokens this one continues; None: its prompt begins a sequence."""
    given: NDArray[np.int32]
    """[K]: tokens between the parent's output and this one's; without a parent, the prompt."""
    sequence: TokenSequence
    """Begins with the prompt, and its output once it is sampled; a turn that continues this one may follow."""
    num_prompt_tokens: int
    """Number of tokens before the output."""
    history: Exchange | None
    """The conversation before `messages`; None: there is none."""
    messages: tuple[Message, ...]
    """The messages after the last reply before."""
    generation: Generation | None = None
    """The tokens sampled, log-probabilities and versions, as the engine returned them; None: not finished."""
    text: str = ""
    """Text of the tokens sampled, special tokens included, without the one that ends the turn."""
    reply: ParsedReply | None = None
    """The answer as the client sees it."""
    exchange: Exchange | None = None
    """The conversation with the reply; None: not finished."""
    stop: str | None = None
    """The stop text of the request that ended the reply; None: none did."""
    is_cut: bool = False
    """Whether the reply was ended by the episode's limit of tokens."""

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens before the output."""
        return self.sequence.token_ids[: self.num_prompt_tokens]


def make_turn(
    number: int, parent: Turn | None, given: Sequence[int], history: Exchange | None, messages: tuple[Message, ...]
) -> Turn:
    """Return a turn that is not sampled yet; the tokens `given` follow the output of the parent."""
    if parent is None:
        sequence = TokenSequence(given)
    else:
        assert parent.generation is not None, f"turn {parent.number} is not finished"
        sequence = parent.sequence
        if sequence.last is not parent:  # another turn continues it
            sequence = TokenSequence(sequence.token_ids[: parent.num_prompt_tokens + len(parent.generation.token_ids)])
        sequence.token_ids += given
    turn = sequence.last = Turn(
        number=number,
        parent=parent,
        given=np.array(given, np.int32),
        sequence=sequence,
        num_prompt_tokens=len(sequence.token_ids),
        history=history,
        messages=messages,
    )
    return turn


def call_id(turn: Turn, index: int) -> str:
    """Return the id of a call, unique in its session; nine characters, which some chat templates require."""
    return f"c{turn.number:05d}{index:03d}"


def split_sequences(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the finished turns of each token sequence; each turn is in one, and the last turn in the last one.

    The first turn of a sequence has its whole prompt as given tokens, each further one those after its parent.
    """
    sequences: list[list[Turn]] = []
    ends: dict[int, list[Turn]] = {}
    for turn in sorted((t for t in turns if t.generation is not None), key=lambda t: t.number):
        sequence = None if turn.parent is None else ends.pop(turn.parent.number, None)
        if sequence is None:
            sequence = []
            sequences.append(sequence)
        sequence.append(turn)
        ends[turn.number] = sequence
    return sorted(sequences, key=lambda sequence: sequence[-1].number)


def make_trajectories(
    turns: Sequence[Turn], prompt: Prompt, group_id: int, *, finish_reason: str, reward: float | None = None
) -> list[Trajectory]:
    """Return a trajectory for each token sequence; without finished turns, one of the prompt alone.

    Args:
        reward: that of the harness, which belongs to the last turn; None: it returned none.
    """
    trajectories = []
    sequences = split_sequences(turns)
    for segment, sequence in enumerate(sequences):
        parts: list[tuple[NDArray[np.int32], Generation | None]] = []
        for position, turn in enumerate(sequence):
            given = turn.given if position else np.array(turn.prompt_ids, np.int32)
            assert turn.generation is not None
            parts += [(given, None), (turn.generation.token_ids, turn.generation)]
        is_last = segment == len(sequences) - 1
        rewards = (*[0.0] * (len(sequence) - 1), reward) if reward is not None and is_last else ()
        trajectories.append(
            _trajectory(parts, prompt, group_id, segment=segment, finish_reason=finish_reason, turn_rewards=rewards)
        )
    if not trajectories:
        given = np.array(prompt.token_ids, np.int32)
        return [_trajectory([(given, None)], prompt, group_id, segment=0, finish_reason=finish_reason)]
    return trajectories


def _trajectory(
    parts: Sequence[tuple[NDArray[np.int32], Generation | None]],
    prompt: Prompt,
    group_id: int,
    *,
    segment: int,
    finish_reason: str,
    turn_rewards: tuple[float, ...] = (),
) -> Trajectory:
    """Return the tokens one after the other; those with a generation are the sampled ones."""
    lengths = [len(token_ids) for token_ids, _ in parts]
    pairs = list(zip(lengths, (generation for _, generation in parts), strict=True))
    return Trajectory(
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        token_ids=np.concatenate([token_ids for token_ids, _ in parts]),
        loss_mask=np.repeat([generation is not None for _, generation in parts], lengths),
        logprobs=np.concatenate([np.zeros(n, np.float32) if g is None else g.logprobs for n, g in pairs]),
        policy_versions=np.concatenate(
            [np.full(n, -1, np.int32) if g is None else g.policy_versions for n, g in pairs]
        ),
        finish_reason=finish_reason,
        segment=segment,
        turn_rewards=turn_rewards,
    )
