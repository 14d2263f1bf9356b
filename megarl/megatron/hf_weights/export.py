"""Writing the model in Hugging Face format, by all ranks together.

    plan       tensors that the same ranks hold share files; every file is dealt to one rank
    move       resharding: a writer needs the whole tensors of its files, and gets them box by box
    write      each round's boxes to their places, in files with temporary names
    publish    once all ranks have finished: rank 0 gives the files their names, config.json last

A folder without config.json is no model, so whatever ends an export early leaves nothing that looks like one; until
all files are written, a model that was in the folder before stays whole.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megarl.errors import DataError, MegarlError, WeightSyncError
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.hf_weights.export_plan import num_bytes, plan_export
from megarl.megatron.hf_weights.file_sink import FileSink
from megarl.model_files.file_plan import PlannedFile
from megarl.model_files.json_object import read_json_object
from megarl.model_files.weight_index import read_headers
from megarl.model_files.writer import FileWriter, publish
from megarl.reshard.layout.layout import TensorSpec, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.strategy import Outlets, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.transfer.bucket import torch_dtype

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import ModelRank

BUCKET_BYTES = 64 * 2**20
"""An export takes two of these beside the parameters."""

PATIENCE_SECONDS = 300
SLOWEST_DISK = 10 * 2**20
"""Bytes per second: an export that is slower has failed."""

_T = TypeVar("_T")

COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files beside the weights: generation configuration, tokenizer, chat template."""


def save(model: ModelRank, source: str, folder: str) -> None:
    """Write the weights into `folder`, and what stands beside them in `source`; all ranks together.

    Raises:
        DataError: a rank could not write; names it. The temporary files are gone.
    """
    rank, target = dist.get_rank(), Path(folder)
    is_publisher = rank == 0
    layouts, topology = _exchange(model.layout)
    plan = plan_export(target, layouts, _copies(model, Path(source)))
    config = _together(target, lambda: _prepare(Path(source), target) if is_publisher else {})
    context = SyncContext(rank=rank, sources=layouts, topology=topology, needs=plan.needs)
    writer = FileWriter(target, plan.files_of(rank))
    try:
        _together(target, lambda: _write(context, model, writer))
        if is_publisher:
            _set_dtype(config, model.layout.tensors)
            _set_head(config, model.model)
        _together(target, lambda: _publish(plan.files, config, Path(source), target) if is_publisher else None)
    except BaseException:
        writer.discard()
        raise


def _copies(model: ModelRank, source: Path) -> dict[str, str]:
    """Those of the model's that `source` has, or all where it has no weights to go by."""
    copies = model.model.copies()
    if not copies or not any(source.glob("*.safetensors")):
        return copies
    there = read_headers(source)
    return {name: of for name, of in copies.items() if name in there}


def _exchange(layout: WeightLayout) -> tuple[list[WeightLayout], Topology]:
    """What every rank holds, and which ranks share a machine."""
    mine = layout, socket.gethostname()
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    hosts = [host for _, host in every]
    return [of for of, _ in every], Topology(tuple(hosts.index(host) for host in hosts))


def _together(target: Path, step: Callable[[], _T]) -> _T:
    """What `step` returned, once it has ended well on every rank; else raise on every rank."""
    error: OSError | MegarlError | None = None
    try:
        result = step()
    except (OSError, MegarlError) as e:
        error = e
    told: list[tuple[bool, int, str] | None] = [None] * dist.get_world_size()
    # of a rank that failed, the others see a lost connection: causes come first
    mine = None if error is None else (isinstance(error, WeightSyncError), dist.get_rank(), str(error))
    dist.all_gather_object(told, mine)
    problems = sorted(each for each in told if each is not None)
    if problems:
        _, rank, what = problems[0]
        raise DataError(f"{target}: the model could not be written, on rank {rank}: {what}") from error
    return result


def _prepare(source: Path, target: Path) -> dict[str, Any]:
    target.mkdir(parents=True, exist_ok=True)
    return read_json_object(source / "config.json")


def _write(context: SyncContext, model: ModelRank, writer: FileWriter) -> None:
    tensors = model.tensors()
    for piece in model.layout.pieces:
        needs = torch_dtype(model.layout.tensors[piece.tensor].dtype)
        assert tensors[piece.local].dtype == needs, (piece, tensors[piece.local].dtype)
    total = sum(num_bytes(spec) for spec in model.layout.tensors.values())
    strategy = BoxStrategy(context, BUCKET_BYTES, timeout_seconds=PATIENCE_SECONDS + total / SLOWEST_DISK)
    sink = FileSink(writer)
    try:
        with torch.no_grad():
            strategy.push(tensors, Outlets(boxes=sink if context.rank in context.needs else None))
    finally:
        sink.close()
        strategy.close()
    sink.finish()


def _publish(files: Sequence[PlannedFile], config: Mapping[str, Any], source: Path, target: Path) -> None:
    (target / "config.json").unlink(missing_ok=True)
    publish(target, files)
    for pattern in COPIED:
        for file in source.glob(pattern):
            is_ours = file.name == "config.json" or file.name.endswith(".index.json")
            if not is_ours and file.resolve() != (target / file.name).resolve():
                shutil.copy(file, target / file.name)
    partial = target / ".config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(target / "config.json")


def _set_dtype(config: dict[str, Any], tensors: Mapping[str, TensorSpec]) -> None:
    """Say in which dtype most bytes are, under the name that the file uses."""
    bytes_of: dict[str, int] = defaultdict(int)
    for spec in tensors.values():
        bytes_of[spec.dtype] += num_bytes(spec)
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    config.update(dict.fromkeys(names, max(bytes_of, key=lambda dtype: bytes_of[dtype])))


def _set_head(config: dict[str, Any], model: Decoder) -> None:
    """Describe a value model, which may have started as a language model, as transformers writes it."""
    if model.head == "lm":
        return
    config.update(architectures=[model.architecture], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    if config.get("pad_token_id") is None:  # without it, transformers takes no batches
        ends = config.get("eos_token_id")
        config["pad_token_id"] = next(iter(ends), None) if isinstance(ends, list) else ends
