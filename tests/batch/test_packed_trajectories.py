"""Packed trajectories equal those that were packed, in every field and bit; tokens after a push in their request."""

import pickle
from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch.packed_trajectories import PackedGroups, PackedTrajectories
from megarl.batch.trajectory import Trajectory, count_turns, find_mixed_kv


def random_segment(random: Random, group: int, segment: int, **values: Any) -> Trajectory:
    """Return turns of prompt or tool tokens and of sampled ones, whose versions rise at any of their tokens."""
    mask: list[bool] = []
    for _ in range(random.randint(0, 4)):
        mask += [False] * random.randint(0, 5) + [True] * random.randint(0, 9)
    versions, version = [], random.randint(0, 3)
    for is_sampled in mask:
        version += random.random() < 0.1
        versions.append(version if is_sampled else -1)
    n, mask_T = len(mask), np.array(mask, np.bool_)
    logprobs = [random.choice([-0.0, float("-inf"), random.gauss(-1, 1)]) if m else 0.0 for m in mask]
    return Trajectory(
        prompt_id=f"d.jsonl:{group} é",
        group_id=group,
        token_ids=np.array([random.randrange(2**31) for _ in range(n)], np.int32),
        loss_mask=mask_T,
        logprobs=np.array(logprobs, np.float32),
        policy_versions=np.array(versions, np.int32),
        segment=segment,
        turn_rewards=tuple(random.random() for _ in range(count_turns(mask_T))) if random.random() < 0.5 else (),
        routes=random_routes(random, n),
        **values,
    )


def random_routes(random: Random, num_tokens: int) -> Any:
    """Return routes through 3 layers in one byte or two per expert, or None."""
    kind = random.choice([None, np.uint8, np.uint16])
    if kind is None:
        return None
    return np.array([random.randrange(256) for _ in range(num_tokens * 6)], kind).reshape(num_tokens, 3, 2)


def random_group(random: Random, group: int) -> list[Trajectory]:
    """Return episodes of one or several segments, on some of which a reward failed."""
    trajectories = []
    for _ in range(random.randint(0, 6)):
        rewards = {"match": random.random(), "match/near": 0.1 * random.randint(0, 9)}
        values: dict[str, Any] = {"rewards": rewards, "reward": random.random(), "finish_reason": "length"}
        if random.random() < 0.2:
            values = {"reward_errors": {"environment": "no reply"}, "finish_reason": "failed"}
        segments = random.choice([1, 1, 1, 3])
        trajectories += [random_segment(random, group, segment, **values) for segment in range(segments)]
    return trajectories


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return every field; arrays as their type and bytes, in which -0.0 and 0.0 differ."""
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {k: (v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for k, v in values.items()}


def assert_same(found: Any, expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    assert list(map(values_of, found)) == list(map(values_of, expected))


def transferred(packed: PackedTrajectories) -> PackedTrajectories:
    """Return a copy as another process reads it, without a copy of its bytes; they are read-only there."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1, "one block of bytes"
    assert packed.data.nbytes > 1000 or len(body) < 5000
    found: PackedTrajectories = pickle.loads(body, buffers=[bytes(buffer.raw()) for buffer in buffers])
    return found


@pytest.mark.parametrize("seed", range(100))
def test_groups_are_unpacked_as_they_were(seed):
    group = random_group(Random(seed), seed)
    packed = PackedTrajectories.of(group)
    assert_same(packed, group)
    assert_same(transferred(packed), group)
    assert PackedTrajectories.of(packed) is packed
    assert_same(packed[1:], group[1:])
    assert_same([packed[-1]] if group else [], group[-1:])
    with pytest.raises(IndexError):
        packed[len(group)]


@pytest.mark.parametrize("seed", range(100))
def test_selected_trajectories_of_several_groups_are_joined_in_order(seed):
    random = Random(seed)
    groups = [random_group(random, number) for number in range(random.randint(0, 5))]
    members = [sorted(random.sample(range(len(group)), random.randint(0, len(group)))) for group in groups]
    packed = [PackedTrajectories.of(group) if random.random() < 0.8 else group for group in groups]
    joined = PackedTrajectories.join(list(zip(packed, members, strict=True)))
    expected = [group[i] for group, indices in zip(groups, members, strict=True) for i in indices]
    assert_same(joined, expected)
    again = sorted(random.sample(range(len(expected)), len(expected) // 2))
    assert_same(PackedTrajectories.join([(joined, again)]), [expected[i] for i in again])


@pytest.mark.parametrize("seed", range(50))
def test_groups_that_are_stored_together_are_joined_with_others_in_any_order(seed):
    random = Random(seed)
    objects = [[random_group(random, number) for number in range(random.randint(0, 4))] for _ in range(3)]
    packed = [PackedGroups.of([PackedTrajectories.of(group) for group in groups]) for groups in objects]
    for groups, found in zip(objects, packed, strict=True):
        assert len(found) == len(groups)
        for group, own in zip(groups, found, strict=True):
            assert_same(own, group)
            assert_same(own[1:], group[1:])
    chosen = [(o, g) for o, groups in enumerate(objects) for g in range(len(groups))]
    random.shuffle(chosen)
    members = [sorted(random.sample(range(n := len(objects[o][g])), random.randint(0, n))) for o, g in chosen]
    parts = [(packed[o][g], own) for (o, g), own in zip(chosen, members, strict=True)]
    expected = [objects[o][g][i] for (o, g), own in zip(chosen, members, strict=True) for i in own]
    joined = PackedTrajectories.join(parts)
    assert_same(joined, expected)
    assert len(joined.details) <= sum(len(each.packed.details) for each in packed)


def test_tokens_are_slices_of_the_block():
    packed = transferred(PackedTrajectories.of(random_group(Random(1), 0)))
    for trajectory in packed:
        if trajectory.num_tokens:
            assert np.shares_memory(trajectory.token_ids, packed.data)
            assert np.shares_memory(trajectory.logprobs, packed.data)
            assert not trajectory.token_ids.flags.writeable


def test_a_token_takes_eight_bytes():
    n = 10_000
    mask = np.arange(n) >= 100
    arrays = {"token_ids": np.zeros(n, np.int32), "logprobs": np.zeros(n, np.float32), "loss_mask": mask}
    versions = np.where(mask, np.arange(n) // 5000, -1).astype(np.int32)
    trajectory = Trajectory(prompt_id="a", group_id=0, policy_versions=versions, **arrays)  # type: ignore[arg-type]
    assert PackedTrajectories.of([trajectory] * 8).data.nbytes == 8 * (8 * n + 20 + 3 * 9)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12))
def test_tokens_of_another_version_than_the_first_of_their_request(tokens):
    expected, first = [], None
    for is_sampled, version in tokens:
        first = (version if first is None else first) if is_sampled else None
        expected.append(is_sampled and version != first)
    mask = np.array([is_sampled for is_sampled, _ in tokens], np.bool_)
    versions = np.array([version for _, version in tokens], np.int32)
    assert find_mixed_kv(mask, versions).tolist() == expected
