"""The turns of a session as a tree, and the token sequences that it is trained on.

turn 0   prompt 0 | output 0
turn 1             '- given 1 | output 1            the first turn after another continues its sequence
turn 2             '- given 2 | output 2            a second one has a sequence of its own: prompt 0, output 0 and
                                                    given 2 are its prompt, of which nothing is trained on again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.rollout.engine import Generation
from megarl.rollout.environments.environment import Message
from megarl.rollout.gateway.reply_parser import ParsedReply


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request of the policy and its answer."""

    number: int
    """Counts the turns of a session from 0, in the order of their requests."""
    parent: Turn | None
    """The turn whose tokens this one continues; None: its prompt begins a sequence."""
    given: NDArray[np.int32]
    """[K]: tokens between the parent's output and this one's; without a parent, the prompt."""
    given_text: str
    """What `ChatRenderer.render` writes after the parent's text; it begins with the end of the parent's turn, of which
    the tokens may have been sampled."""
    messages: tuple[Message, ...]
    """The conversation before the reply, with earlier replies as their text."""
    structured: tuple[Message, ...]
    """The same conversation with the thoughts and calls of earlier replies apart from their content."""
    generation: Generation | None = None
    """The tokens sampled, log-probabilities and versions, as the engine returned them; None: not finished."""
    text: str = ""
    """Text of the tokens sampled, special tokens included, without the one that ends the turn."""
    reply: ParsedReply | None = None
    """The answer as the client sees it."""
    is_cut: bool = False
    """Whether the reply was ended by the episode's limit of tokens."""

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[K]: all tokens before the output."""
        return np.concatenate([*self._ids_before(), self.given])

    @property
    def all_text(self) -> str:
        """What the prompt was rendered as, and the text of the output."""
        parts = [(turn.given_text, turn.text) for turn in self._chain()]
        return "".join(text for pair in parts[::-1] for text in pair)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the output."""
        return len(self.given) + sum(map(len, self._ids_before()))

    def _ids_before(self) -> list[NDArray[np.int32]]:
        """Return the given and the sampled tokens of each earlier turn that this one continues."""
        parts = []
        for turn in self._chain():
            if turn is not self:
                assert turn.generation is not None, f"turn {turn.number} is not finished"
                parts += [turn.generation.token_ids, turn.given]
        return parts[::-1]

    def _chain(self) -> Iterator[Turn]:
        """Yield this turn and those that it continues, the first one last."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


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
            given = turn.given if position else turn.prompt_ids
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
