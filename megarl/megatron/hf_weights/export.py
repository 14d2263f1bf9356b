"""Exports the model in Hugging Face format; all ranks write files.

    plan       group tensors held by the same ranks into files; assign each file to one rank
    transfer   reshard: a writer receives the full tensors of its files, box by box
    write      write the boxes of each round to their offsets, in files with temporary names
    publish    after all ranks have finished: rank 0 renames the files and writes config.json last

A folder without config.json is not a valid model, so an interrupted export never looks complete. Until all files are
written, a model that was in the folder before stays intact.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.errors import DataError, LostLockError, MegarlError, WeightSyncError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.hf_weights.export_plan import num_bytes, plan_export
from megarl.megatron.hf_weights.file_sink import FileSink
from megarl.model_files.block_fp8 import CONFIG_KEY
from megarl.model_files.companions import copy_companions
from megarl.model_files.file_plan import PlannedFile
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import read_model_config
from megarl.model_files.weight_index import read_headers
from megarl.model_files.writer import SafetensorsWriter, publish
from megarl.process.atomic_files import atomic_write
from megarl.reshard.layout.layout import TensorSpec, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.strategy import Sinks, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.transfer.bucket import torch_dtype
from megarl.reshard.transfer.layout_exchange import all_gather_bytes, exchange_layouts

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel

BUCKET_BYTES = 64 * 2**20
"""Size of a transfer bucket in bytes; an export needs memory for two in addition to the parameters."""

BASE_TIMEOUT_SECONDS = 300
"""Timeout of an export, without the time for its bytes (`MIN_BYTES_PER_SECOND`)."""
MIN_BYTES_PER_SECOND = 10 * 2**20
"""Minimum write rate, in bytes per second; a slower export times out."""


def save(model: MegatronModel, source: str, folder: str, *, require_lock: Callable[[], None] = lambda: None) -> None:
    """Write the weights and copies of the other files in `source` into `folder`; collective over all ranks.

    Args:
        require_lock: called on rank 0 before anything is written and again before the files are published; raises if
            this run may no longer write.

    Raises:
        DataError: a rank could not write; the message names the rank. Temporary files are removed.
        LostLockError: as `require_lock` raised it, on all ranks; a model in `folder` stays as it was.
    """
    rank, target = dist.get_rank(), Path(folder)
    is_publisher = rank == 0
    layouts, topology = _gather_layouts(model.layout)
    plan = plan_export(target, layouts, _duplicated_tensors(model, Path(source)))
    config = _on_all_ranks(target, lambda: _prepare(Path(source), target, require_lock) if is_publisher else {})
    context = SyncContext(rank=rank, sources=layouts, topology=topology, needs=plan.needs)
    writer = SafetensorsWriter(target, plan.files_of(rank))
    try:
        _on_all_ranks(target, lambda: _write(context, model, writer))
        if is_publisher:
            _set_dtype(config, model.layout.tensors)
            _set_head(config, model.architecture)
            describe_weights(config, model.architecture)
        _on_all_ranks(
            target, lambda: _publish(plan.files, config, Path(source), target, require_lock) if is_publisher else None
        )
    except BaseException:
        writer.discard()
        raise


def _duplicated_tensors(model: MegatronModel, source: Path) -> dict[str, str]:
    """Return the duplicates that `source` contains; all of the architecture's if `source` has no weights."""
    duplicates = model.architecture.duplicated_tensors()
    if not duplicates or not any(source.glob("*.safetensors")):
        return duplicates
    stored = read_headers(source)
    return {name: original for name, original in duplicates.items() if name in stored}


def _gather_layouts(layout: WeightLayout) -> tuple[list[WeightLayout], Topology]:
    """Gather the layouts of all ranks, and which ranks share a node."""
    hosts = all_gather_bytes(socket.gethostname().encode())
    return exchange_layouts(layout, dist.get_rank()), Topology(tuple(hosts.index(host) for host in hosts))


def _on_all_ranks[T](target: Path, step: Callable[[], T]) -> T:
    """Run `step` and return its result if it succeeded on all ranks; otherwise raise an error on all ranks.

    The error is a DataError, or a LostLockError if that is the root cause.
    """
    error: OSError | MegarlError | None = None
    try:
        result = step()
    except (OSError, MegarlError) as e:
        error = e
    errors: list[tuple[bool, int, str, bool] | None] = [None] * dist.get_world_size()
    # other ranks only see a lost connection to a rank that failed: sort root causes first
    mine = (
        None
        if error is None
        else (
            isinstance(error, WeightSyncError),
            dist.get_rank(),
            str(error),
            isinstance(error, LostLockError),
        )
    )
    dist.all_gather_object(errors, mine)
    problems = sorted(each for each in errors if each is not None)
    if problems:
        _, rank, cause, is_lock_lost = problems[0]
        if is_lock_lost:
            raise LostLockError(cause) from error
        raise DataError(f"{target}: the model could not be written, on rank {rank}: {cause}") from error
    return result


def _prepare(source: Path, target: Path, require_lock: Callable[[], None]) -> JsonObject:
    require_lock()
    target.mkdir(parents=True, exist_ok=True)
    return read_model_config(source)


def _write(context: SyncContext, model: MegatronModel, writer: SafetensorsWriter) -> None:
    tensors = model.tensors()
    for piece in model.layout.pieces:
        needs = torch_dtype(model.layout.tensors[piece.tensor].dtype)
        assert tensors[piece.local].dtype == needs, (piece, tensors[piece.local].dtype)
    total = sum(num_bytes(spec) for spec in model.layout.tensors.values())
    strategy = BoxStrategy(context, BUCKET_BYTES, timeout_seconds=BASE_TIMEOUT_SECONDS + total / MIN_BYTES_PER_SECOND)
    sink = FileSink(writer)
    try:
        with torch.no_grad():
            strategy.push(tensors, Sinks(boxes=sink if context.rank in context.needs else None))
    finally:
        sink.close()
        strategy.close()
    sink.finish()


def _publish(
    files: Sequence[PlannedFile], config: JsonMapping, source: Path, target: Path, require_lock: Callable[[], None]
) -> None:
    require_lock()
    (target / "config.json").unlink(missing_ok=True)
    publish(target, files)
    copy_companions(source, target)
    with atomic_write(target / "config.json") as draft:
        draft.write_text(json.dumps(config, indent=2) + "\n")


def _set_dtype(config: JsonObject, tensors: Mapping[str, TensorSpec]) -> None:
    """Set the dtype of most bytes, under the key that the config uses."""
    bytes_of: dict[str, int] = defaultdict(int)
    for spec in tensors.values():
        bytes_of[spec.dtype] += num_bytes(spec)
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    config.update(dict.fromkeys(names, max(bytes_of, key=lambda dtype: bytes_of[dtype])))


def _set_head(config: JsonObject, model: ModelArchitecture) -> None:
    """Describe a value model as transformers does; the config may be that of the initial language model."""
    if model.head == "lm":
        return
    config.update(architectures=[model.name], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    if config.get("pad_token_id") is None:  # transformers needs it for batches
        ends = config.get("eos_token_id")
        config["pad_token_id"] = next(iter(ends), None) if isinstance(ends, list) else ends


def describe_weights(config: JsonObject, model: ModelArchitecture) -> None:
    """Describe the weights of `model` in `config`: their number of MTP layers, which may be missing, not quantized."""
    key = "num_nextn_predict_layers"
    config.pop(CONFIG_KEY, None)
    if (config.get(key) or 0) != model.num_mtp_layers:
        config[key] = model.num_mtp_layers
