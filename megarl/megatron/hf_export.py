"""Exports the model in Hugging Face format; all ranks write files.

    plan       group tensors held by the same ranks into files; assign each file to one rank
    transfer   reshard: a writer receives the full tensors of its files, box by box
    write      write the boxes of each round to their offsets, in files with temporary names
    publish    after all ranks have finished: rank 0 renames the files and writes config.json last

A folder without config.json is not a valid model, so an interrupted export never looks complete. Until all files are
written, a model that was in the folder before stays intact.

For engines that need weights in FP8, each rank quantizes its own before a weight sync:

    held tensors     bfloat16 shards
    maxima           the largest magnitude of each block, in this rank's part of it
    all-reduce       over the tensor-parallel ranks, of the blocks that shards cut; none if they cut none
    quantized        FP8 values and scales, beside the held tensors, until the sync has ended

The all-reduce is one call for all weights of a group, in the trainer's process group and with its time-out.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.cluster.process.atomic_files import atomic_write
from megarl.errors import DataError, LostLockError, MegarlError, WeightSyncError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import STACKED_EXPERTS
from megarl.model_files.file_plan import PlannedFile, TensorSpecs
from megarl.model_files.json_object import JsonMapping, JsonObject
from megarl.model_files.model_config import MTP_KEY, OTHER_MTP_KEY, copy_companions, language_config, read_model_config
from megarl.model_files.quantization import CONFIG_KEY
from megarl.model_files.tensor_io import SafetensorsReader, SafetensorsWriter, publish
from megarl.model_files.weight_index import matches_any, merge_pairs, read_headers, stored_shape
from megarl.reshard.layout.layout import TensorSpec, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.strategy import Sinks, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.transfer.bucket import torch_dtype
from megarl.reshard.transfer.process_groups import all_gather_bytes, exchange_layouts

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from torch import Tensor

from megarl.model_files.file_plan import assign_files, plan_files, relative_slices, split_box
from megarl.model_files.quantization import BLOCK, VALUES_DTYPE, scale_shape, scales_of
from megarl.reshard.layout.layout import Box, ShardPiece, extent, intersect, slices, volume
from megarl.reshard.layout.model_tensors import ModelTensors
from megarl.reshard.layout.quantized_layout import QuantizedPiece, find_quantized_pieces, quantize_layout
from megarl.reshard.transfer.bucket import BoxBucket, BoxSlot, MappedBuckets
from megarl_kernels import fp8_block_encode, fp8_block_maxima, fp8_block_scales


class BlockQuantizer:
    """Quantizes some weights of one rank. Collective over the ranks that share weights, as is every call."""

    def __init__(
        self,
        layout: WeightLayout,
        names: Collection[str],
        groups: Sequence[dist.ProcessGroup],
        group_number: Callable[[str], int],
    ) -> None:
        """Find out which blocks ranks share.

        Args:
            layout: what this rank holds.
            names: weights to quantize.
            groups: groups of this rank that share weights, in the same order on all ranks.
            group_number: returns the index of the group that shares a local tensor.
        """
        self.layout = quantize_layout(layout, names)
        """What this rank sends."""
        self._shape = {name: layout.tensors[name].shape for name in names}
        self._pieces = find_quantized_pieces(layout, names)
        self._shared = [
            (group, self._find_shared(group, number, group_number))
            for number, group in enumerate(groups)
            if group.size() > 1
        ]
        self.num_bytes = 0
        """Memory of the values and scales of the last call."""

    def quantize(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of `layout`; those that are quantized are newly allocated.

        Args:
            tensors: what this rank holds, by local name.
        """
        maxima = self._find_maxima(tensors)
        for group, names in self._shared:
            if not names:
                continue
            grids = [maxima.setdefault(name, self._empty_grid(name, tensors)) for name in names]
            flat = torch.cat([grid.view(-1) for grid in grids])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
            for grid, part in zip(grids, torch.split(flat, [grid.numel() for grid in grids]), strict=True):
                grid.copy_(part.view(grid.shape))
        scales = {name: fp8_block_scales(grid) for name, grid in maxima.items()}
        quantized: dict[str, Tensor] = {}
        for piece in self._pieces:
            held = tensors[piece.source.local]
            weight = held[slices(piece.source.local_box)]
            if piece.values not in quantized:
                quantized[piece.values] = torch.empty(held.shape, dtype=torch.float8_e4m3fn, device=held.device)
            out = quantized[piece.values][slices(piece.source.local_box)]
            of_weight = scales[piece.source.tensor]
            fp8_block_encode(weight, of_weight[slices(piece.touched_blocks)], out, **_offsets(piece))
            quantized[piece.scales] = of_weight[slices(piece.scale_box)].contiguous()
        self.num_bytes = sum(tensor.nbytes for tensor in quantized.values())
        return {**tensors, **quantized}

    def _find_maxima(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the largest magnitude of this rank's part of each block, by weight; 0 where it has no part."""
        maxima: dict[str, Tensor] = {}
        for piece in self._pieces:
            name = piece.source.tensor
            grid = maxima.setdefault(name, self._empty_grid(name, tensors))
            part = grid[slices(piece.touched_blocks)]
            weight = tensors[piece.source.local][slices(piece.source.local_box)]
            torch.maximum(part, fp8_block_maxima(weight, **_offsets(piece)), out=part)
        return maxima

    def _empty_grid(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        device = next(iter(tensors.values())).device
        return torch.zeros(scale_shape(self._shape[name]), dtype=torch.float32, device=device)

    def _find_shared(self, group: dist.ProcessGroup, number: int, group_number: Callable[[str], int]) -> list[str]:
        """Return the weights of which the ranks of the group share blocks, in the same order on all of them."""
        cut = {
            piece.source.tensor
            for piece in self._pieces
            if group_number(piece.source.local) == number and piece.cuts_blocks(self._shape[piece.source.tensor])
        }
        gathered: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(gathered, sorted(cut), group)
        return sorted(set().union(*gathered))


def _offsets(piece: QuantizedPiece) -> dict[str, int]:
    (row, _), (column, _) = piece.source.box
    return {"row_offset": row % BLOCK, "column_offset": column % BLOCK}


MAX_JOINED_ELEMENTS = 2**19
"""Maximum number of elements of rows that are joined before they are written."""


class FileSink:
    """Writes each round's boxes to this rank's files while the next round is transferred.

    After a write error it keeps receiving rounds without writing them: the other ranks would wait for it.
    """

    def __init__(self, writer: SafetensorsWriter) -> None:
        self._writer = writer
        self._error: OSError | None = None
        self._thread = ThreadPoolExecutor(1)
        self._mapped = MappedBuckets()

    def load_boxes(self, _: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Write the boxes of a round in the background; the returned function waits for it (`ShardSink`)."""
        if bucket is None:
            return lambda: None
        return self._thread.submit(self._try_to_write, self._mapped.map(bucket), bucket.slots).result

    def close(self) -> None:
        """Wait for pending writes and unmap the buckets."""
        self._thread.shutdown()
        self._mapped.clear()

    def finish(self) -> None:
        """Fsync the files; raise the first OSError of the writes, if any."""
        if self._error is not None:
            raise self._error
        self._writer.finish()

    def _try_to_write(self, data: Tensor, slots: Sequence[BoxSlot]) -> None:
        if self._error is None:
            try:
                self._write(data, slots)
            except OSError as e:
                self._error = e

    def _write(self, data: Tensor, slots: Sequence[BoxSlot]) -> None:
        boxes: dict[str, dict[Box, Tensor]] = defaultdict(dict)
        for slot in slots:
            elements = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            is_paired = len(slot.local_box) > len(self._writer.full_box(slot.local))
            box = merge_pairs(slot.local_box) if is_paired else slot.local_box
            boxes[slot.local][box] = elements.view(extent(box))
        for name, values in boxes.items():
            union = _bounding_rows(list(values), self._writer.full_box(name))
            if union is None:
                for box, tensor in values.items():
                    self._writer.write(name, box, tensor)
            else:
                self._write_joined(name, union, values)

    def _write_joined(self, name: str, union: Box, values: Mapping[Box, Tensor]) -> None:
        """Join rows whose columns come from several ranks, so that they are written at once, not per rank and row."""
        for strip in split_box(union, MAX_JOINED_ELEMENTS):
            rows = torch.empty(extent(strip), dtype=next(iter(values.values())).dtype)
            for box, tensor in values.items():
                shared = intersect(box, strip)
                if shared is not None:
                    rows[relative_slices(shared, strip)] = tensor[relative_slices(shared, box)].to(rows.device)
            self._writer.write(name, strip, rows)


def _bounding_rows(boxes: Sequence[Box], tensor: Box) -> Box | None:
    """Return the union of the boxes if it is a box and some of them do not span full rows; else None."""
    if all(box[1:] == tensor[1:] for box in boxes):
        return None
    union = tuple((min(box[dim][0] for box in boxes), max(box[dim][1] for box in boxes)) for dim in range(len(tensor)))
    return union if volume(union) == sum(map(volume, boxes)) else None


FILE_BYTES = 2 * 2**30
"""Maximum size of a file's tensors in bytes; a larger tensor has its own file."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Files of an export and the ranks that write them; identical on every rank."""

    files: tuple[PlannedFile, ...]
    writers: tuple[int, ...]
    """Writing rank of each file."""
    needs: Mapping[int, WeightLayout]
    """Layout that each writing rank needs: the tensors of its files, in full; local names are those in the files."""

    def files_of(self, rank: int) -> list[PlannedFile]:
        """Return the files that `rank` writes."""
        return [file for file, writer in zip(self.files, self.writers, strict=True) if writer == rank]


def plan_export(
    folder: Path,
    layouts: Sequence[WeightLayout],
    copies: Mapping[str, str] = MappingProxyType({}),
    passed: TensorSpecs = MappingProxyType({}),
) -> ExportPlan:
    """Plan the files in `folder` and their writers, given the layouts of all ranks.

    Args:
        copies: additional name -> tensor that is also written under that name.
        passed: additional tensors, which no rank holds.
    """
    tensors = layouts[0].tensors
    held = [_held_bytes(layout) for layout in layouts]
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, of in enumerate(held):
        for name in of:
            holders[name].append(rank)
    groups: dict[tuple[int, ...], dict[str, tuple[tuple[int, ...], str]]] = defaultdict(dict)
    written = {name: name for name in tensors} | dict(copies)
    for name, source in written.items():
        groups[tuple(holders[source])][name] = (stored_shape(source, tensors[source].shape), tensors[source].dtype)
    if passed:
        groups[()] = dict(passed)
    files = plan_files(folder, list(groups.values()), FILE_BYTES)
    writers = assign_files(files, held)
    order = _interleave_writers(files, writers)
    names: dict[int, list[str]] = defaultdict(list)
    for file, writer in zip(files, writers, strict=True):
        names[writer] += [name for name in file.tensors if name in written]
    specs = ModelTensors({name: tensors[name] for name in order if name in tensors})
    needs = {
        writer: WeightLayout(
            specs, tuple(ShardPiece(written[n], specs[written[n]].box, n, specs[written[n]].box) for n in of)
        )
        for writer, of in names.items()
    }
    return ExportPlan(files, tuple(writers), needs)


def _held_bytes(layout: WeightLayout) -> dict[str, int]:
    """Return how many bytes of each tensor the rank holds; tensors that it does not hold are left out."""
    table = layout.pieces
    held = np.bincount(table.columns.tensor, table.num_elements, minlength=len(table.tensors))
    specs = [layout.tensors[name] for name in table.tensors]
    return {
        # a rank may hold a tied embedding twice
        name: min(int(count) * torch_dtype(spec.dtype).itemsize, num_bytes(spec))
        for name, spec, count in zip(table.tensors, specs, held, strict=True)
        if count
    }


def _interleave_writers(files: Sequence[PlannedFile], writers: Sequence[int]) -> list[str]:
    """Return the tensors in an order that serves all writers evenly, so that they write at the same time."""
    progress: dict[str, float] = {}
    total: dict[int, int] = defaultdict(int)
    for file, writer in zip(files, writers, strict=True):
        for name, stored in file.tensors.items():
            progress[name] = total[writer] + stored.num_bytes / 2
            total[writer] += stored.num_bytes
    for file, writer in zip(files, writers, strict=True):
        for name in file.tensors:
            progress[name] /= max(total[writer], 1)
    return sorted(progress, key=lambda name: progress[name])


def num_bytes(spec: TensorSpec) -> int:
    """Return the size of the full tensor in bytes."""
    return volume(spec.box) * torch_dtype(spec.dtype).itemsize


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
    passed = _passed_tensors(model, Path(source))
    plan = plan_export(target, layouts, _duplicated_tensors(model, Path(source)), passed)
    config = _on_all_ranks(target, lambda: _prepare(Path(source), target, require_lock) if is_publisher else {})
    context = SyncContext(rank=rank, sources=layouts, topology=topology, needs=plan.needs)
    writer = SafetensorsWriter(target, plan.files_of(rank))
    with ExitStack() as undo:
        undo.callback(writer.discard)
        _on_all_ranks(target, lambda: _write(context, model, writer, passed, Path(source)))
        if is_publisher:
            _set_dtype(config, model.layout.tensors)
            set_head(config, model.architecture)
            describe_weights(config, model.architecture)
        _on_all_ranks(
            target, lambda: _publish(plan.files, config, Path(source), target, require_lock) if is_publisher else None
        )
        undo.pop_all()


def _duplicated_tensors(model: MegatronModel, source: Path) -> dict[str, str]:
    """Return the duplicates that `source` contains; all of the architecture's if `source` has no weights."""
    duplicates = model.architecture.duplicated_tensors()
    if not duplicates or not any(source.glob("*.safetensors")):
        return duplicates
    stored = read_headers(source)
    return {name: original for name, original in duplicates.items() if name in stored}


PASSED = "passed"
"""Subfolder with the tensors that an export repeats, beside the other files of a model folder without weights."""


def save_passed(model: MegatronModel, source: Path, target: Path) -> None:
    """Write the tensors of `source` that exports repeat to `target`/passed, if there are any; by one rank only."""
    passed, folder = _passed_tensors(model, source), target / PASSED
    if not passed:
        return
    folder.mkdir()
    files = plan_files(folder, [passed], FILE_BYTES)
    writer = SafetensorsWriter(folder, files)
    _write_passed(writer, passed, source)
    writer.finish()
    publish(folder, files)


def _folder_of_passed(source: Path) -> Path:
    return source if any(source.glob("*.safetensors")) else source / PASSED


def _passed_tensors(model: MegatronModel, source: Path) -> TensorSpecs:
    """Return the tensors of `source` that the export repeats; none if neither it nor its subfolder has weights.

    Those that are quantized become bfloat16, as the export states no quantization.
    """
    patterns, folder = model.architecture.passed_patterns, _folder_of_passed(source)
    if not patterns or not any(folder.glob("*.safetensors")):
        return {}
    stored = read_headers(folder)
    without = scales_of(stored)
    return {
        name: (tensor.shape, "bfloat16" if tensor.dtype == VALUES_DTYPE else tensor.dtype)
        for name, tensor in stored.items()
        if name not in without and matches_any(name, patterns)
    }


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


def _write(
    context: SyncContext, model: MegatronModel, writer: SafetensorsWriter, passed: TensorSpecs, source: Path
) -> None:
    _write_passed(writer, passed, source)
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


def _write_passed(writer: SafetensorsWriter, passed: TensorSpecs, source: Path) -> None:
    """Write the tensors of `source` that the export repeats and that are in this rank's files."""
    names = passed.keys() & writer.names
    if not names:
        return
    with SafetensorsReader(_folder_of_passed(source)) as folder:
        for name in sorted(names):
            for box in split_box(writer.full_box(name), MAX_JOINED_ELEMENTS):
                values = torch.empty(extent(box), dtype=torch_dtype(passed[name][1]))
                folder.read(name, box, values)
                writer.write(name, box, values)


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
    dtype = max(bytes_of, key=lambda dtype: bytes_of[dtype])
    stated = [(keys, name) for keys in _language_keys(config) for name in ("dtype", "torch_dtype") if name in keys]
    for keys, name in stated or [(config, "torch_dtype")]:
        keys[name] = dtype


def set_head(config: JsonObject, model: ModelArchitecture) -> None:
    """Describe a value model as transformers does; the config may be that of the initial language model."""
    if model.head == "lm":
        return
    config.update(architectures=[model.name], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    if config.get("pad_token_id") is None:  # transformers needs it for batches
        ends = config.get("eos_token_id")
        config["pad_token_id"] = next(iter(ends), None) if isinstance(ends, list) else ends


def describe_weights(config: JsonObject, model: ModelArchitecture) -> None:
    """Describe the weights of `model` in `config`: their number of MTP layers, which may be missing, not quantized."""
    for keys in _language_keys(config):
        keys.pop(CONFIG_KEY, None)
        keys.pop(STACKED_EXPERTS, None)
        if OTHER_MTP_KEY in keys:
            keys[MTP_KEY] = keys.pop(OTHER_MTP_KEY)
    if (language_config(config).get(MTP_KEY) or 0) != model.num_mtp_layers:
        _language_keys(config)[-1][MTP_KEY] = model.num_mtp_layers


def _language_keys(config: JsonObject) -> list[JsonObject]:
    """Return the objects of a config.json that hold keys of the language model; the last one takes precedence."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]
