"""The boxes that a TP rank receives in every sync, checked against its model once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from megarl.engines.sglang.weight_layout.engine_trace import (
    TRANSPOSED,
    box_text,
    fold,
    join_names,
    model_tensors,
)
from megarl.engines.sglang.weight_layout.load_recorder import Coverage
from megarl.errors import WeightSyncError
from megarl.model_files.model_config import language_config, read_model_config, untrained_patterns
from megarl.model_files.quantization import VALUES_DTYPE
from megarl.model_files.weight_index import derived_tensor_patterns, matches_any, read_headers
from megarl.reshard.layout.layout import Ints, contains, extent, full_local, slices, volume
from megarl.reshard.transfer.bucket import (
    BoxSlot,
    WeightBucket,
    consecutive,
    copy_boxes,
    dtype_name,
    torch_dtype,
    views_like,
)
from megarl.reshard.transfer.element_code import decode_boxes


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the model folder."""

    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name, e.g. `bfloat16`."""
    required: bool
    """Every update brings the tensor; False for tensors that engines derive or ignore, or that training leaves as they
    are."""
    is_untrained: bool = False
    """Training leaves the tensor as it is (`UNTRAINED_TENSORS`): the engine has it from the folder."""


@functools.cache
def read_expected_tensors(model_path: str) -> Mapping[str, ExpectedTensor]:
    """Return the expected tensors by Hugging Face name, from the safetensors headers of the folder.

    Raises:
        DataError: the folder has no safetensors files, or one of them or config.json cannot be read.
    """
    folder = Path(model_path)
    tensors = read_headers(folder)
    config = language_config(read_model_config(folder))
    without = derived_tensor_patterns(tied=bool(config.get("tie_word_embeddings", False)))
    untrained = {name for name in tensors if matches_any(name, untrained_patterns(config))}
    return {
        name: ExpectedTensor(
            t.shape,
            t.dtype,
            required=name not in untrained and not matches_any(name, without),
            is_untrained=name in untrained,
        )
        for name, t in tensors.items()
    }


def find_bucket_problems(bucket: WeightBucket, expected: Mapping[str, ExpectedTensor], dtype: str) -> list[str]:
    """Return one message for each invalid tensor of a bucket.

    Args:
        dtype: dtype of the engine; a tensor may have this dtype or that of the folder, and a vector may be float32.
            Weights in FP8 need to be sent so, because their scales are.
    """
    found, seen = [], set()
    for slot in bucket.slots:
        wanted = expected.get(slot.name)
        if wanted is None:
            found.append(f"{slot.name} is no tensor of the model")
        elif slot.shape != wanted.shape:
            found.append(f"{slot.name} needs shape {list(wanted.shape)}, got {list(slot.shape)}")
        elif slot.dtype not in (allowed := _allowed_dtypes(dtype, wanted)):
            needs = " or ".join(dict.fromkeys(allowed))
            found.append(f"{slot.name} needs dtype {needs}, got {slot.dtype}")
        elif slot.name in seen:
            found.append(f"{slot.name} is contained twice")
        elif slot.offset + slot.num_bytes > bucket.num_bytes:
            found.append(
                f"{slot.name} ends at byte {slot.offset} + {slot.num_bytes} = {slot.offset + slot.num_bytes}, "
                f"the bucket at {bucket.num_bytes}"
            )
        seen.add(slot.name)
    return found


def _allowed_dtypes(of_engine: str, wanted: ExpectedTensor) -> tuple[str, ...]:
    if wanted.dtype == VALUES_DTYPE:
        return (wanted.dtype,)
    return (of_engine, wanted.dtype, *(("float32",) if len(wanted.shape) == 1 else ()))


class PlannedBoxes:
    """A TP rank's boxes of all rounds, with views of the parameters that they are copied to.

    Methods raise WeightSyncError if boxes do not fit the model or a bucket, or if two overlap.
    """

    def __init__(
        self, model: nn.Module, rounds: Sequence[Sequence[BoxSlot]], full_tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Check the boxes.

        Args:
            full_tensors: by Hugging Face name, the tensors that are received in full, which the engine then loads. They
                keep their values until the next sync, which may send changed elements only. None: there are none.
        """
        self._rounds, self.full_tensors = rounds, full_tensors or {}
        self.written: dict[tuple[str, int], Coverage] = defaultdict(Coverage)
        """The boxes, by tensor name and number of dimensions."""
        self._dims: dict[str, int] = {}
        targets, problems = self._find_targets(model), []
        for slot in (slot for slots in rounds for slot in slots):
            problem = self._find_problem(slot, targets)
            if problem is None:
                self.written[slot.local, len(slot.local_box)].add(slot.local_box)
            else:
                problems.append(problem)
        if problems:
            raise WeightSyncError(join_names(list(dict.fromkeys(problems))))
        self.tensors = self._find_tensors(targets)
        """Parameters by name, viewed with as many dimensions as their boxes have."""
        self._views: list[list[Tensor]] | None = None
        """By round, the parts of the parameters that its boxes are copied to; None until they are needed."""
        self._ends = [max((slot.offset + slot.num_bytes for slot in slots), default=0) for slots in rounds]
        self._runs = [
            consecutive([slot.offset for slot in slots], [slot.num_bytes for slot in slots]) for slots in rounds
        ]
        """By round, its boxes that lie one after another in the bucket."""

    def _find_targets(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what boxes are written to: `find_targets`, and the tensors that are received in full."""
        return find_targets(model) | {full_local(name): tensor for name, tensor in self.full_tensors.items()}

    def _find_problem(self, slot: BoxSlot, targets: dict[str, Tensor]) -> str | None:
        """Return why the box must not be written; None if it is valid."""
        if slot.local not in targets:
            return f"{slot.local} is no parameter of the engine"
        target = targets[slot.local]
        what = f"{slot.local} {box_text(slot.local_box)}"
        is_paired = slot.local_box[-1:] == ((0, 2),) and target.shape[-1:].numel() % 2 == 0
        if len(slot.local_box) > target.dim() + is_paired:
            return f"{what} has {len(slot.local_box)} dimensions, the parameter {target.dim()}"
        folded = fold(target, len(slot.local_box))
        full_box = tuple((0, n) for n in folded.shape)
        if min(extent(slot.local_box), default=1) < 1 or not contains(full_box, slot.local_box):
            return f"{what} does not lie in the parameter, which has shape {list(folded.shape)}"
        dtype = torch_dtype(slot.dtype)
        if dtype != folded.dtype:
            return f"{what} needs dtype {dtype_name(folded.dtype)}, got {slot.dtype}"
        if slot.offset % dtype.itemsize or slot.offset < 0:
            return f"{what} lies at byte {slot.offset} of the bucket, which is no multiple of {dtype.itemsize}"
        num_dims = self._dims.setdefault(slot.local, len(slot.local_box))
        if num_dims != len(slot.local_box):
            return f"{slot.local} is received both with {num_dims} and with {len(slot.local_box)} dimensions"
        others = self.written[slot.local, num_dims].overlapping(slot.local_box)
        return f"{what} is also written as part of {box_text(others[0])}" if others else None

    def refresh(self, model: nn.Module) -> None:
        """Look the parameters up again, because SGLang may have reallocated them."""
        try:
            found = self._find_tensors(self._find_targets(model))
        except KeyError as e:
            raise WeightSyncError(f"{e.args[0]} is no longer a parameter of the engine") from e
        for name, tensor in found.items():
            before = self.tensors[name]
            if (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
                raise WeightSyncError(
                    f"{name} was {dtype_name(before.dtype)} {list(before.shape)} when the sync was planned, and is "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)} now"
                )
            if (tensor.data_ptr(), tensor.stride()) != (before.data_ptr(), before.stride()):
                self._views = None
        self.tensors = found

    def all_rounds(self) -> dict[int, None]:
        """Return the rounds that have boxes, for a sync of all of them; see `check_codes`."""
        return {index: None for index, slots in enumerate(self._rounds) if slots}

    def write_round(self, index: int, bucket: Tensor, lines: Ints | None = None) -> None:
        """Write what has come in round `index` from the bucket, uint8 [num_bytes], into the parameters.

        Args:
            lines: of `check_codes`, if codes of changed elements have come; None: all boxes.
        """
        if self._views is None:
            self._views = [[self.tensors[s.local][slices(s.local_box)] for s in slots] for slots in self._rounds]
        views, slots = self._views[index], self._rounds[index]
        if lines is not None:
            decode_boxes(bucket, lines, [views[slot] for slot in lines[:, 0].tolist()])
            return
        if self._ends[index] > bucket.numel():
            raise WeightSyncError(f"round {index} ends at byte {self._ends[index]}, the bucket at {bucket.numel()}")
        sources: list[Tensor] = []
        for run in self._runs[index]:
            sources += views_like(bucket, slots[run.start].offset, views[run])
        copy_boxes(views, sources)

    def check_codes(self, lines: Ints) -> dict[int, Ints]:
        """Return, by round, the lines of the codes that come in a sync of changed elements.

        Args:
            lines: int64 [n, 4], see `BoxReceiver.receive_codes`; sorted by round.
        """
        sizes = np.array([len(slots) for slots in self._rounds], np.int64)
        first = np.cumsum(sizes) - sizes
        elements = np.array([volume(slot.local_box) for slots in self._rounds for slot in slots], np.int64)
        number, slot, changed, offset = lines.T
        valid = (number >= 0) & (number < len(sizes)) & (slot >= 0)
        valid[valid] &= slot[valid] < sizes[number[valid]]
        valid[valid] &= changed[valid] <= elements[first[number[valid]] + slot[valid]]
        valid &= (changed > 0) & (offset >= 0)
        if not valid.all():
            round_, *line = lines[~valid][0].tolist()
            raise WeightSyncError(f"round {round_} has no box for {line} (slot, changed elements and offset)")
        ends = np.flatnonzero(np.diff(number)) + 1
        return {int(lines[0, 0]): lines[:, 1:] for lines in np.split(lines, ends) if len(lines)}

    def _find_tensors(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        return {local: fold(targets[local], num_dims) for local, num_dims in self._dims.items()}


def find_targets(model: nn.Module) -> dict[str, Tensor]:
    """Return `model_tensors`, and transposed views of them. Not cached: SGLang may reallocate parameters."""
    found = model_tensors(model)
    return found | {name + TRANSPOSED: tensor.mT for name, tensor in found.items() if tensor.dim() > 2}
