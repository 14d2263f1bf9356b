"""The section `checkpoint`: when checkpoints are written, and which are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints that a run can resume from, in `<run_dir>/checkpoints`."""

    every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. One is also written after the last step, and when the run is stopped early.
    0: none; an interrupted run, or one that loses its trainer, starts over from step 0. Its journal then has only
    the groups of the step in progress, and of later ones, unless `keep_journal` is `all`."""

    keep_last: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep. With 2, a run can resume even if the latest is damaged."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept forever. 0: none."""

    asynchronous: bool = True
    """Write files in the background from a copy in host memory, while training continues."""

    max_staging_bytes: int | None = Field(default=None, ge=0)
    """Limit in bytes of that copy per rank. What exceeds it is written before training continues. Default: no limit."""

    hf: bool = False
    """Also write the model in Hugging Face format, to the checkpoint's folder `hf`. Training waits for this."""

    keep_journal: Literal["needed", "all"] = "needed"
    """Which groups stay in `<run_dir>/journal`. `needed`: those that a run reads that resumes from one of the last
    `keep_last` checkpoints. `all`: of every step, 8 bytes a token, so that `megarl replay` can repeat the whole run."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the manifest before a checkpoint is loaded: checksums of all files, or only their sizes."""
