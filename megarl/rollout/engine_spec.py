"""What an engine needs to know to start, and how a configuration becomes it. Imports neither SGLang nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.errors import DataError
from megarl.rollout.unsupported_options import require_served

CPU_MAX_TOTAL_TOKENS = 65_536
CPU_MAX_RUNNING_REQUESTS = 128
PORTS_PER_REPLICA = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine; plain data, so that it crosses processes. `None` leaves a choice to SGLang."""

    model_path: str
    tp: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """As torch names it."""
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    mem_fraction: float | None = None
    port: int | None = None
    """Of the engine's process group. None: any free one."""
    seed: int = 0
    deterministic: bool = False
    """A completion depends on its prompt, its seed and the weights, not on what else the engine is doing."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of them ends a completion; see `stop_token_ids`."""
    policy_version: int = 0
    """Of the weights in `model_path`."""
    log_dir: str | None = None
    """Where the scheduler processes write their output. None: a temporary folder, removed on shutdown."""
    start_timeout_seconds: float = 600.0
    round_timeout_seconds: float = 60.0
    """How long one TP rank's boxes of a round wait for the other ranks'."""
    answer_timeout_seconds: float = 60.0
    """How long the engine may take over one step of an update of weights."""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Further `sglang.Engine` arguments."""


def engine_spec(config: RunConfig, replica: int, device: str) -> EngineSpec:
    """The spec of one replica, with the defaults of its device filled in.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: such an engine would run another model than config.json describes.
    """
    file = Path(config.model.path) / "config.json"
    require_served(_read_json(file), device, origin=str(file))
    engine = config.rollout.engine
    cpu = device == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if cpu else "bfloat16"
    return EngineSpec(
        model_path=config.model.path,
        tp=config.rollout.tp,
        device=device,
        dtype=dtype,
        max_total_tokens=engine.max_total_tokens or (CPU_MAX_TOTAL_TOKENS if cpu else None),
        max_running_requests=engine.max_running_requests or (CPU_MAX_RUNNING_REQUESTS if cpu else None),
        mem_fraction=engine.mem_fraction,
        port=None if engine.base_port is None else engine.base_port + PORTS_PER_REPLICA * replica,
        seed=config.seed + replica,
        deterministic=cpu if engine.deterministic is None else engine.deterministic,
        stop_token_ids=stop_token_ids(config.model.path),
        log_dir=f"{config.run_dir}/logs/engine-{replica}",
        start_timeout_seconds=engine.start_timeout_seconds,
        # together no more than the senders' own patience, so that they hear which rank is missing
        round_timeout_seconds=config.weight_sync.timeout_seconds / 2,
        answer_timeout_seconds=config.weight_sync.timeout_seconds / 2,
        extra_args=dict(engine.extra_args),
    )


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """Every token that ends a completion: of generation_config.json, config.json and the tokenizer, sorted.

    All three, because they disagree in many published folders: a base model's config names the end of a text, its
    tokenizer the end of a turn.

    Raises:
        DataError: a file is not JSON, or none of the three names such a token.
    """
    folder = Path(model_path)
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        ids.update(_token_id(_read_json(folder / "tokenizer.json"), token))
    if not ids:
        raise DataError(f"{folder}: needs an end-of-sequence token in config.json or tokenizer_config.json, got none")
    return tuple(sorted(ids))


def _token_id(tokenizer: dict[str, Any], token: str) -> list[int]:
    added = [entry["id"] for entry in tokenizer.get("added_tokens", []) if entry.get("content") == token]
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not added and isinstance(vocabulary, dict) and token in vocabulary:
        return [vocabulary[token]]
    return added


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{file}: cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise DataError(f"{file}: needs a JSON object, got {type(content).__name__}")
    return content
