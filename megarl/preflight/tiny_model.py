"""The small random model that `model.tiny` configures."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from megarl.config import StageConfig


def will_write_model(config: StageConfig) -> bool:
    """Whether `model.tiny` is set and `model.path` does not exist yet."""
    return config.model.tiny is not None and not Path(config.model.path).exists()


def write_missing_model(config: StageConfig) -> None:
    """Write the model that `model.tiny` describes to `model.path`, unless that exists.

    Raises:
        DataError: a training file cannot be read.
    """
    if not will_write_model(config):
        return
    from megarl.data.rows import read_rows
    from megarl.data.tiny_checkpoint import write_tiny_model

    assert config.model.tiny is not None
    fields = config.data.fields
    wanted = (fields.prompt, fields.response, fields.answer, fields.chosen, fields.rejected)
    rows = chain.from_iterable(map(read_rows, config.data.training_files.values()))
    texts = (_text(row.fields[name]) for row in rows for name in wanted if name in row.fields)
    write_tiny_model(config.model.path, texts, seed=config.seed, **config.model.tiny.model_dump())


def _text(value: object) -> str:
    """Return a field as text; messages as roles and contents, one below the other."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        parts = [str(message.get(name, "")) for message in value for name in ("role", "content")]
        return "\n".join([*parts, "assistant\n"])
    return str(value)
