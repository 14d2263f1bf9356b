"""Models that are named by their id on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@main`.

The driver downloads each into the local cache of huggingface_hub and continues with the snapshot's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from megarl.config.commands import ScoreConfig
from megarl.config.run import StageConfig, model_paths, replace_model_paths
from megarl.errors import ConfigError

Kind = Literal["model", "dataset"]


def download_snapshot(
    kind: Kind, repo: str, revision: str | None, files: Sequence[str], *, ignored: Sequence[str] = ()
) -> Path:
    """Download files of a repository, unless the cache has them; return their folder, whose name is the commit hash.

    Args:
        repo: organization and name.
        revision: branch, tag or commit hash; None: the default branch.
        files: patterns of the files to download.
        ignored: patterns of files among these that are not downloaded.

    Raises:
        ConfigError: the hub does not have the repository, does not permit access, or cannot be reached.
    """
    try:
        folder = snapshot_download(
            repo, repo_type=kind, revision=revision, allow_patterns=list(files), ignore_patterns=list(ignored)
        )
    except (httpx.HTTPError, OSError, ValueError) as e:
        raise ConfigError(_describe_error(e, kind, repo, revision)) from e
    return Path(folder)


def _describe_error(error: Exception, kind: Kind, repo: str, revision: str | None) -> str:
    """Return the cause of a failed download in one line."""
    hub = constants.ENDPOINT
    page = f"{hub}/{repo}" if kind == "model" else f"{hub}/datasets/{repo}"
    # huggingface_hub looks into its cache before it reports that the hub cannot be reached
    cause = (isinstance(error, LocalEntryNotFoundError) and error.__cause__) or error
    match cause:
        case GatedRepoError():
            return f"its license needs to be accepted at {page} by the user of HF_TOKEN or `hf auth login`"
        case RepositoryNotFoundError():
            return f"{hub} has no {kind} {repo}, or it is private and needs HF_TOKEN or `hf auth login`"
        case RevisionNotFoundError():
            return f"{page} has no revision {revision or constants.DEFAULT_REVISION}"
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not have all of its files"
        case HfHubHTTPError():
            return f"{hub} answers {cause.response.status_code} {cause.response.reason_phrase}".rstrip()
        case httpx.TransportError():
            return f"{hub} cannot be reached ({str(cause) or type(cause).__name__})"
        case _:
            return str(cause).splitlines()[0]


HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
"""Organization and name, and optionally a branch, tag or commit hash."""

COMMIT = re.compile(r"[0-9a-f]{40}")

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files of a model that are downloaded: weights, configuration, chat template, tokenizer; never pickles."""

CODE_FILES = ("*.py",)
"""Files that are downloaded as well with `model.trust_remote_code`."""

IGNORED_FILES = ("*/*", "consolidated*")
"""Files that `MODEL_FILES` matches and that are not downloaded: other formats of the same weights."""


def with_local_models[C: StageConfig | ScoreConfig](
    config: C, recorded: Mapping[str, str] | None = None, notify: Callable[[str], object] = lambda line: None
) -> C:
    """Return `config` with a local folder in place of every hub id, and the commits in `model.hub_revisions`.

    With `model.trust_remote_code`, the folders have the code of the models, and every hub id needs a commit.

    A path with a folder of that name is left as it is, and so is one that is no hub id, whether it exists or not.

    Args:
        recorded: hub id -> commit of the run to resume; `model.hub_revisions` takes precedence.
        notify: receives one line for each hub id.

    Raises:
        ConfigError: a model cannot be downloaded, or needs a commit; one line per key.
    """
    ids = hub_ids(config)
    if not ids:
        return config
    commits = {**(recorded or {}), **config.model.hub_revisions}
    folders: dict[str, Path] = {}
    problems = []
    for key, hub_id in ids.items():
        if hub_id in folders:
            continue
        try:
            folders[hub_id] = _download(hub_id, commits.get(hub_id), with_code=config.model.trust_remote_code)
        except ConfigError as e:
            problems.append(f"{key}: {e}")
        else:
            notify(f"{key}: {hub_id} is commit {folders[hub_id].name}, in {folders[hub_id]}")
    if problems:
        raise ConfigError("\n".join(problems))
    local = replace_model_paths(config, lambda key, path: str(folders[path]) if key in ids else path)
    revisions = {hub_id: folder.name for hub_id, folder in folders.items()}
    return cast("C", local.model_copy(update={"model": local.model.model_copy(update={"hub_revisions": revisions})}))


def _download(hub_id: str, commit: str | None, *, with_code: bool) -> Path:
    """Download a model, with its code only from a commit that is given in full; raises as `download_model`."""
    if not with_code:
        return download_model(hub_id, commit=commit)
    repo, _, revision = hub_id.partition("@")
    pinned = commit or revision
    if COMMIT.fullmatch(pinned) is None:
        raise ConfigError(
            f"model.trust_remote_code needs a commit hash of 40 digits, as {repo}@COMMIT or in model.hub_revisions, "
            f"got {pinned or 'no revision'}"
        )
    return download_model(hub_id, commit=commit, files=(*MODEL_FILES, *CODE_FILES))


def hub_ids(config: StageConfig | ScoreConfig) -> dict[str, str]:
    """Return YAML key -> hub id of the models in `config` that have no local folder."""
    ids = {key: path for key, path in model_paths(config).items() if is_hub_id(path)}
    if config.model.tiny is not None:
        ids.pop("model.path", None)  # the model is written to this path
    return ids


def is_hub_id(path: str) -> bool:
    """Whether `path` has the form of a hub id, not of a config.json, and there is no file or folder of this name."""
    return HUB_ID.fullmatch(path) is not None and not path.endswith(".json") and not Path(path).exists()


def local_model(path: str, *, key: str, files: tuple[str, ...] = MODEL_FILES) -> str:
    """Return `path`, or the folder of the snapshot if it is a hub id.

    Args:
        key: option that names the model, for error messages.
        files: patterns of the files to download.

    Raises:
        ConfigError: the model cannot be downloaded.
    """
    if not is_hub_id(path):
        return path
    try:
        return str(download_model(path, files=files))
    except ConfigError as e:
        raise ConfigError(f"{key}: {e}") from e


def download_model(hub_id: str, *, commit: str | None = None, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Download a model, unless the cache has it, and return its folder, whose name is the commit hash.

    Args:
        hub_id: matches `HUB_ID`.
        commit: commit hash to download instead of the revision in `hub_id`.
        files: patterns of the files to download.

    Raises:
        ConfigError: the hub does not have the model, does not permit access, or cannot be reached.
    """
    match = HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    try:
        return download_snapshot("model", match["repo"], commit or match["revision"], files, ignored=IGNORED_FILES)
    except ConfigError as e:
        raise ConfigError(f"there is no folder {hub_id}, and the model cannot be loaded from the hub: {e}") from e
