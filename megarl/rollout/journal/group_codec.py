"""Serializes a finished group of trajectories to an Arrow message, one row per trajectory.

Nothing is lost except surrogates in messages and names, which become U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megarl.batch.trajectory import Trajectory
from megarl.text import map_text, replace_surrogates

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("group_id", pa.int64()),
        ("token_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("logprobs", pa.large_list(pa.float32())),
        ("policy_versions", pa.large_list(pa.int32())),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("reward", pa.float64()),
        ("reward_errors", pa.map_(pa.string(), pa.string())),
        ("finish_reason", pa.string()),
        ("segment", pa.int32()),
        ("turn_rewards", pa.list_(pa.float64())),
    ]
)
PER_TOKEN = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "policy_versions": np.int32}


def encode_group(trajectories: Sequence[Trajectory]) -> pa.Buffer:
    """Return the trajectories as an Arrow record batch of `SCHEMA`, serialized as an IPC message."""
    offsets = pa.array(np.cumsum([0, *(t.num_tokens for t in trajectories)]), pa.int64())
    columns: list[pa.Array] = []
    for field in SCHEMA:
        values = [getattr(t, field.name) for t in trajectories]
        if field.name in PER_TOKEN:
            flat = pa.array(np.concatenate(values), field.type.value_type)
            columns.append(pa.LargeListArray.from_arrays(offsets, flat))
        elif pa.types.is_map(field.type):
            pairs = [list(mapping.items()) for mapping in values]
            columns.append(pa.array(map_text(pairs, replace_surrogates), field.type))
        elif pa.types.is_list(field.type):
            columns.append(pa.array(map(list, values), field.type))
        else:
            columns.append(pa.array(map_text(values, replace_surrogates), field.type))
    return pa.record_batch(columns, schema=SCHEMA).serialize()


def decode_group(body: bytes) -> list[Trajectory]:
    """Return the trajectories that `encode_group` has serialized, bit for bit."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
    columns: dict[str, Sequence[object]] = {
        name: _split(batch.column(name), PER_TOKEN[name])
        if name in PER_TOKEN
        else batch.column(name).to_pylist(maps_as_pydicts="strict")
        for name in SCHEMA.names
    }
    columns["turn_rewards"] = list(map(tuple, batch.column("turn_rewards").to_pylist()))
    return [Trajectory(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _split(column: pa.LargeListArray, dtype: type[np.generic]) -> list[NDArray[np.generic]]:
    flat = column.values.to_numpy(zero_copy_only=False).astype(dtype)  # a copy, so that it is aligned and writable
    return np.split(flat, column.offsets.to_numpy()[1:-1])
