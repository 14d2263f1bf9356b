"""Ranks that read a model in one format and write it in another, for the controller to call. Imports nothing heavy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import COMPANIONS, RELEASE, TRACKER
from megarl.megatron.requests import ModelSpec

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import ModelRank


class ConvertWorker:
    """One rank with its shards of the model alone. Every method runs on all ranks together."""

    def __init__(self, spec: ModelSpec) -> None:
        """Build the model of `spec.model_path`/config.json, weights not yet set."""
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import ModelRank

        self._rank: ModelRank = ModelRank(replace(spec, weights="none"))

    def read_hf(self, folder: str) -> None:
        """Fill the parameters from the safetensors of `folder`."""
        from megarl.megatron.hf_weights import local_layout

        local_layout.read_weights(folder, self._rank.layout, self._rank.tensors())

    def read_checkpoint(self, folder: str) -> None:
        """Fill the parameters from the distributed checkpoint in `folder`."""
        from megarl.megatron.checkpoint import model_state

        model_state.load_model(self._rank, folder)

    def write_hf(self, folder: str) -> None:
        """Write `folder` in Hugging Face format, with what stands beside the configuration."""
        from megarl.megatron.hf_weights import export

        export.save(self._rank, self._rank.spec.model_path, folder)

    def write_checkpoint(self, root: str) -> None:
        """Write a Megatron checkpoint into `root`; see `checkpoint_files`."""
        import torch.distributed as dist

        from megarl.megatron.checkpoint import model_state
        from megarl.megatron.hf_weights.export import COPIED

        model_state.save_model(self._rank, Path(root) / RELEASE)
        if dist.get_rank() != 0:
            return
        try:
            _copy_companions(Path(self._rank.spec.model_path), Path(root) / COMPANIONS, COPIED)
            (Path(root) / TRACKER).write_text(RELEASE)
        except OSError as e:
            raise DataError(f"{root}: the checkpoint could not be written, on rank 0: {e}") from e


def _copy_companions(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    target.mkdir()
    for pattern in patterns:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, target / file.name)
