"""What decides the future of a run beside its models, and where its books stand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megarl.data.sampler import SamplerState
from megarl.errors import DataError
from megarl.process.atomic_files import replaced
from megarl.run.run_totals import Books
from megarl.tracking.tracker import ResumedMetrics

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Taken between two steps, when no request is in flight and every finished trajectory has been used.

    What only reinforcement learning has is left as it is by other stages.
    """

    step: int = 0
    """The last one that is over."""
    policy_version: int = 0
    samplers: Mapping[str, SamplerState] = field(default_factory=dict)
    """By data source, counted in rows."""
    carried: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name the fields of what an algorithm carries from step to step; see `PolicyRun.carry`."""
    skips_in_a_row: int = 0
    """Last steps that have left the policy as it was; see `limits.max_skips_in_a_row`."""
    metrics_bytes: int = 0
    """Length of `metrics.jsonl`."""
    books: Books = field(default_factory=Books)

    def write(self, folder: Path) -> None:
        """Write `state.json` into `folder`, whole or not at all."""
        with replaced(folder / STATE_FILE) as draft:
            draft.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Of a checkpoint's `folder`.

        Raises:
            DataError: it holds none that can be read.
        """
        path = folder / STATE_FILE
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from e
        except ValidationError as e:
            where = e.errors()[0]
            raise DataError(f"{path}: {'.'.join(map(str, where['loc'])) or 'the file'}: {where['msg']}") from e


def position(state: RunState) -> ResumedMetrics:
    """Where the metrics stood."""
    return ResumedMetrics(step=state.step, num_bytes=state.metrics_bytes)


_ADAPTER = TypeAdapter(RunState)
