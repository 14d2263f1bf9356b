"""Writing the model in Hugging Face format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from megarl.config.weight_sync import WeightSyncConfig
from megarl.megatron.push import WeightPusher
from megarl.megatron.trainer import MegatronTrainer
from megarl.megatron.work import SyncSetup
from megarl.reshard.bucket import WeightBucket, open_bucket
from megarl.reshard.strategy import Outlets

SHARD_BYTES = 2**30
"""Tensors are written in files of at most this size."""

COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files beside the weights: configuration, generation configuration, tokenizer, chat template."""


class SafetensorsSink:
    """Writes every bucket as one file, and the index at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files, self._bytes = folder, list[list[str]](), 0

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Write the bucket's tensors to a file of their own."""
        tensors = open_bucket(bucket)
        save_file(tensors, self._folder / _temporary(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(tensors))
        self._bytes += sum(t.nbytes for t in tensors.values())
        return lambda: None

    def finish(self) -> None:
        """Give the files their final names and write the index."""
        count, weight_map = len(self._files), {}
        for i, names in enumerate(self._files):
            final = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / _temporary(i)).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save(trainer: MegatronTrainer, source: str, folder: str) -> None:
    """Write weights, and copy what stands beside them in `source`; rank 0 writes, all ranks take part."""
    target, sink, is_writer = Path(folder), SafetensorsSink(Path(folder)), dist.get_rank() == 0
    if is_writer:
        target.mkdir(parents=True, exist_ok=True)
        _copy_companions(Path(source), target)
    config = WeightSyncConfig(strategy="gather_hf", bucket_bytes=SHARD_BYTES)
    pusher = WeightPusher(trainer, SyncSetup(config=config, outlets={0: Outlets(whole=(sink,))}))
    pusher.push()
    pusher.close()
    if is_writer:
        sink.finish()
    dist.barrier()


def _temporary(index: int) -> str:
    return f".model-{index:05d}.partial"


def _copy_companions(source: Path, target: Path) -> None:
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name != "model.safetensors.index.json":
                shutil.copy(file, target / file.name)
