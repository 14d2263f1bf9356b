"""Data files on the Hugging Face Hub, such as `hf://datasets/openai/gsm8k/main/train-*.parquet`.

The driver downloads each into the local cache of huggingface_hub and continues with the local file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.config.paths import data_paths, replace_data_paths
from megarl.config.run import StageConfig
from megarl.errors import ConfigError
from megarl.model_files.hub_download import download_snapshot

SCHEME = "hf://"

HUB_FILE = re.compile(
    r"hf://datasets/(?P<id>(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^/@]+))?)/(?P<file>[^/@].*)"
)
"""Organization, name and optionally branch, tag or commit hash of a dataset; then a file, or a pattern of its name."""


def hub_files(config: StageConfig) -> dict[str, str]:
    """Return YAML key -> path of the data files that are on the hub."""
    return {key: path for key, path in data_paths(config).items() if path.startswith(SCHEME)}


def with_local_data[C: StageConfig](
    config: C, recorded: Mapping[str, str] | None = None, notify: Callable[[str], object] = lambda line: None
) -> C:
    """Return `config` with a local file in place of every file on the hub, and the commits in `data.hub_revisions`.

    Args:
        recorded: dataset, as its path names it -> commit of the run to resume; `data.hub_revisions` takes precedence.
        notify: receives one line for each file.

    Raises:
        ConfigError: a file cannot be downloaded; one line per key.
    """
    paths = hub_files(config)
    if not paths:
        return config
    commits = {**(recorded or {}), **config.data.hub_revisions}
    files: dict[str, Path] = {}
    problems = []
    for key, path in paths.items():
        try:
            dataset, commit, files[key] = _download(path, commits)
        except ConfigError as e:
            problems.append(f"{key}: {e}")
        else:
            commits[dataset] = commit  # all files of a dataset are of one commit
            notify(f"{key}: {path} is commit {commit}, in {files[key]}")
    if problems:
        raise ConfigError("\n".join(problems))
    local = replace_data_paths(config, lambda key, path: str(files[key]) if key in files else path)
    return local.model_copy(update={"data": local.data.model_copy(update={"hub_revisions": commits})})


def _download(path: str, commits: Mapping[str, str]) -> tuple[str, str, Path]:
    """Return the dataset that `path` names, its commit, and the local file; `commits`: known ones by dataset."""
    match = HUB_FILE.fullmatch(path)
    if match is None:
        raise ConfigError(f"a file on the hub is hf://datasets/ORGANIZATION/NAME/FILE or NAME@REVISION, got {path}")
    dataset, pattern = match["id"], match["file"]
    try:
        folder = download_snapshot("dataset", match["repo"], commits.get(dataset) or match["revision"], [pattern])
    except ConfigError as e:
        raise ConfigError(f"{path} cannot be loaded from the hub: {e}") from e
    found = sorted(file for file in folder.glob(pattern) if file.is_file())
    if len(found) != 1:
        names = ", ".join(str(file.relative_to(folder)) for file in found) or "none"
        raise ConfigError(f"{path} needs to match one file of the dataset, got {names}")
    return dataset, folder.name, found[0]
