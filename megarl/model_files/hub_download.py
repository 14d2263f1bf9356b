"""Download files of a repository of the Hugging Face Hub into the local cache of huggingface_hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

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
