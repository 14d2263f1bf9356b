"""Converts a model between Hugging Face and Megatron formats on one Megatron rank. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import COMPANIONS, RELEASE, TRACKER
from megarl.megatron.requests import ModelSpec
from megarl.model_files.companions import copy_companions
from megarl.model_files.model_config import read_model_config

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel


class ConvertWorker:
    """One rank that holds only its shards of the weights. Every method is a collective call on all ranks."""

    def __init__(self, spec: ModelSpec) -> None:
        """Build the model described by `spec.model_path`/config.json, without loading weights."""
        from megarl.megatron.runtime import platform

        platform.prepare()
        from megarl.megatron.modeling.megatron_model import MegatronModel

        self._model: MegatronModel = MegatronModel(replace(spec, weights="none"))

    def read_hf(self, folder: str) -> None:
        """Load the parameters from the safetensors files in `folder`."""
        from megarl.megatron.hf_weights import local_layout

        local_layout.read_weights(folder, self._model.layout, self._model.tensors())

    def read_checkpoint(self, folder: str) -> None:
        """Load the parameters from the distributed checkpoint in `folder`."""
        from megarl.megatron.checkpoint import model_state

        model_state.load_model(self._model, folder)

    def read_trusted_checkpoint(self, folder: str) -> None:
        """Load the parameters from the distributed checkpoint in `folder`, whose index may execute code."""
        from megarl.megatron.checkpoint import model_state

        model_state.load_model(self._model, folder, trust=True)

    def write_hf(self, folder: str) -> None:
        """Export the model in Hugging Face format to `folder`, with the source model's tokenizer files."""
        from megarl.megatron.hf_weights import export

        export.save(self._model, self._model.spec.model_path, folder)

    def write_checkpoint(self, root: str) -> None:
        """Write a Megatron checkpoint to `root`, laid out as described in `checkpoint_files`."""
        import torch.distributed as dist

        from megarl.megatron.checkpoint import model_state
        from megarl.megatron.hf_weights.export import describe_weights

        model_state.save_model(self._model, Path(root) / RELEASE)
        if dist.get_rank() != 0:
            return
        try:
            source, companions = Path(self._model.spec.model_path), Path(root) / COMPANIONS
            companions.mkdir()
            copy_companions(source, companions)
            config = read_model_config(source)
            describe_weights(config, self._model.architecture)
            (companions / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (Path(root) / TRACKER).write_text(RELEASE)
        except OSError as e:
            raise DataError(f"{root}: rank 0 could not write the checkpoint: {e}") from e
