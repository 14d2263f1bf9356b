from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section


class CheckpointConfig(Section):
    """What a run keeps so that it can go on after an end of any kind: `<run_dir>/checkpoints`."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints; one is saved after the last step too, and when the run is asked to end early. 0: none;
    a run that is interrupted begins anew, and `megarl train` that loses its trainer trains all of its steps again."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep. Two, so that a damaged one costs steps and not the run."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of every so many steps are kept for good; 0: none."""

    asynchronous: bool = True
    """Training goes on while files are written, from a copy in host memory."""

    max_staging_bytes: int | None = Field(default=None, ge=0)
    """Host memory for that copy, a rank; what exceeds it is written before training goes on. Default: not limited."""

    hf: bool = False
    """Write the model in Hugging Face format as well, into the checkpoint's folder `hf`; training waits for that."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the manifest before a checkpoint is loaded: every file's content, or its size alone."""
