"""Finds the paths in a configuration, and makes them absolute for processes elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megarl.config.data import DataConfig, SourceConfig
from megarl.config.model import ModelConfig
from megarl.config.policy import FrozenModelConfig
from megarl.config.reward import ModelRewardConfig
from megarl.config.run import StageConfig
from megarl.config.section import Section

MODEL_SECTIONS = (ModelConfig, FrozenModelConfig, ModelRewardConfig)
"""Sections whose key `path` names a model."""


def replace_model_paths[S: Section](section: S, replace: Callable[[str, str], str], *, prefix: str = "") -> S:
    """Return the section with every model path in it and below, `model.path` included, replaced.

    Args:
        replace: takes the YAML key of a path and the path; returns the new path.
        prefix: YAML key of `section` with a final dot; empty for a whole configuration.
    """
    update: dict[str, object] = {}
    for name, value in section:
        if isinstance(value, Section):
            update[name] = replace_model_paths(value, replace, prefix=f"{prefix}{name}.")
        elif isinstance(value, dict):
            update[name] = {
                key: replace_model_paths(each, replace, prefix=f"{prefix}{name}.{key}.")
                if isinstance(each, Section)
                else each
                for key, each in value.items()
            }
    if isinstance(section, MODEL_SECTIONS) and section.path is not None:
        update["path"] = replace(f"{prefix}path", section.path)
    return section.model_copy(update=update)


def model_paths(config: Section) -> dict[str, str]:
    """Return YAML key -> path of every model that the configuration names."""
    found: dict[str, str] = {}

    def add(key: str, path: str) -> str:
        return found.setdefault(key, path)

    replace_model_paths(config, add)
    return found


def replace_data_paths[C: StageConfig](config: C, replace: Callable[[str, str], str]) -> C:
    """Return `config` with the path of every data file replaced; `replace` takes its YAML key and the path."""
    sources = {
        name: _with_files(source, replace, f"data.sources.{name}.") for name, source in config.data.sources.items()
    }
    data = _with_files(config.data.model_copy(update={"sources": sources}), replace, "data.")
    return config.model_copy(update={"data": data})


def data_paths(config: StageConfig) -> dict[str, str]:
    """Return YAML key -> path of every data file that the configuration names."""
    return {**config.data.training_files, **config.data.held_out_files}


def with_absolute_paths[C: StageConfig](config: C) -> C:
    """Return `config` with absolute paths, for processes with another working directory."""
    update = {"run_dir": _absolute(config.run_dir), "export_dir": _absolute(config.export_path)}
    with_data = replace_data_paths(config, lambda _, path: _absolute(path))
    return replace_model_paths(with_data, lambda _, path: _absolute(path)).model_copy(update=update)


def _with_files[F: (DataConfig, SourceConfig)](section: F, replace: Callable[[str, str], str], prefix: str) -> F:
    paths = {name: getattr(section, name) for name in ("path", "eval_path")}
    return section.model_copy(
        update={name: replace(f"{prefix}{name}", path) for name, path in paths.items() if path is not None}
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
