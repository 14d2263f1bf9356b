"""Conversions between model folders: everything is checked first, then ranks read one format and write the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.config import ConvertConfig
from megarl.controller.ray_session import reserved_slots
from megarl.errors import ConfigError, DataError
from megarl.groups.trainer_group import rank_processes
from megarl.megatron.checkpoint.checkpoint_files import COMPANIONS, find_weights, read_index
from megarl.megatron.convert_worker import ConvertWorker
from megarl.megatron.families.architecture import Decoder, Head
from megarl.megatron.families.layout_checks import parallel_problems
from megarl.megatron.families.model_folder import read_decoder, weight_problems
from megarl.megatron.requests import ModelSpec
from megarl.model_files.header import itemsize
from megarl.model_files.weight_index import read_headers
from megarl.placement.pool import SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.preflight.cluster.cluster_check import Places
from megarl.workers.dispatch import BROADCAST
from megarl.workers.group import Pending, WorkerGroup

OF_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How names of weights begin in a checkpoint, which may hold an optimizer's state too."""

PATIENCE_SECONDS = 600.0
SLOWEST_DISK = 10 * 2**20
"""Bytes per second: how long a rank waits for others to write is reckoned with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that has been found possible."""

    config: ConvertConfig
    description: Path
    """Folder with the model's config.json, and what else goes along with the weights."""
    weights: Path
    read: Callable[[ConvertWorker, str], None]
    write: Callable[[ConvertWorker, str], None]
    output: Path
    head: Head
    dtype: str
    num_bytes: int
    """Of the weights in `dtype`."""

    def run(self, tell: Callable[[str], None]) -> float:
        """Write `output`, which appears once it is whole; `tell` hears what is being done. Returns seconds.

        Raises:
            MegarlError: a rank failed, or the output cannot be written. There is no output then.
        """
        started = time.perf_counter()
        with _draft(self.output) as draft:
            tell(f"starting {self.config.sized_placement.slots} ranks")
            with _ranks(self) as group:
                tell("reading")
                group.call(self.read, str(self.weights.absolute()), via=BROADCAST)
                tell("writing")
                group.call(self.write, str(draft.absolute()), via=BROADCAST)
        return time.perf_counter() - started


class ConvertGroup(WorkerGroup[ConvertWorker]):
    """One Megatron rank per slot, that reads and writes weights."""

    def __init__(self, config: ConvertConfig, pool: SlotPool) -> None:
        grid = RankGrid.of(config.trainer.parallel, config.sized_placement.slots)
        super().__init__("converter", rank_processes(pool, "converter"), grid)

    def start_workers(self, conversion: Conversion) -> Pending[None]:
        """Build the model on every rank."""
        spec = ModelSpec(
            model_path=str(conversion.description.absolute()),
            dtype=conversion.dtype,
            head=conversion.head,
            parallel=conversion.config.trainer.parallel,
            timeout_seconds=PATIENCE_SECONDS + conversion.num_bytes / SLOWEST_DISK,
        )
        return self.start(ConvertWorker, (spec,))


def plan_import(config: ConvertConfig, folder: Path, output: Path, dtype: str) -> Conversion:
    """From the model in `folder` to the Megatron checkpoint `output`.

    Args:
        dtype: `float32`, `bfloat16`, or `auto`: the smaller of these that holds every weight as it is stored.

    Raises:
        ConfigError, DataError: every problem of the folder, the layout and the output.
    """
    try:
        model = read_decoder(folder, head=None)
    except (ConfigError, DataError) as e:
        raise type(e)(f"--model: {e}") from e
    problems = [f"--model: {problem}" for problem in weight_problems(folder, model)]
    problems += [*_layout_problems(config, model), *_output_problems(output)]
    if problems:
        raise ConfigError("\n".join(problems))
    stored = {name: tensor.dtype for name, tensor in read_headers(folder).items()}
    # tensors that have a dtype of their own whatever the model's is stay out of it
    free = [name for name, spec in model.tensors("bfloat16").items() if spec.dtype == "bfloat16"]
    dtype = _widest(stored[name] for name in free) if dtype == "auto" else dtype
    _require_space(output, num_bytes := _num_bytes(model, dtype))
    return Conversion(
        config=config,
        description=folder,
        weights=folder,
        read=ConvertWorker.read_hf,
        write=ConvertWorker.write_checkpoint,
        output=output,
        head=model.head,
        dtype=dtype,
        num_bytes=num_bytes,
    )


def plan_export(config: ConvertConfig, root: Path, output: Path, dtype: str) -> Conversion:
    """From the Megatron checkpoint `root` to the model folder `output`; see `plan_import`."""
    description = root / COMPANIONS
    try:
        weights = find_weights(root)
        index = read_index(weights)
        model = read_decoder(description, head=None)
    except (ConfigError, DataError) as e:
        raise type(e)(f"--model: {e}") from e
    problems = [*_layout_problems(config, model), *_output_problems(output)]
    if problems:
        raise ConfigError("\n".join(problems))
    if dtype == "auto":
        # the bias of experts is float32 whatever the model's dtype is
        weights_only = [name for name in index if name.startswith(OF_MODEL) and not name.endswith("expert_bias")]
        dtype = _widest(index[name].dtype for name in weights_only)
    _require_space(output, num_bytes := _num_bytes(model, dtype))
    return Conversion(
        config=config,
        description=description,
        weights=weights,
        read=ConvertWorker.read_checkpoint,
        write=ConvertWorker.write_hf,
        output=output,
        head=model.head,
        dtype=dtype,
        num_bytes=num_bytes,
    )


def _layout_problems(config: ConvertConfig, model: Decoder) -> Iterator[str]:
    return parallel_problems(model, config.trainer.parallel, config.sized_placement.slots)


def _output_problems(output: Path) -> Iterator[str]:
    if output.exists() and not output.is_dir():
        yield f"--output: needs a folder that is empty or not there yet, {output} is a file"
        return
    there = _existing_parent(output)  # the folder is written beside its place
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK) or not there.is_dir():
        yield f"--output: {output} needs a folder that can be written, {there} cannot"
    elif output.exists() and (num_files := len(list(output.iterdir()))):
        yield f"--output: needs a folder that is empty or not there yet, {output} holds {num_files} files"


def _require_space(output: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(_existing_parent(output)).free
    if free < num_bytes:
        raise ConfigError(f"--output: the weights need {num_bytes} bytes, {output} has {free} free")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _widest(dtypes: Iterable[str]) -> str:
    return "bfloat16" if set(dtypes) == {"bfloat16"} else "float32"


def _num_bytes(model: Decoder, dtype: str) -> int:
    return sum(prod(spec.shape) * itemsize(spec.dtype) for spec in model.tensors(dtype).values())


@contextmanager
def _draft(output: Path) -> Iterator[Path]:
    """A new folder beside `output`: it becomes `output` when the block ends well, and is removed when it does not."""
    output = output.absolute()
    draft = output.with_name(f".{output.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # of a conversion that was killed
    try:
        with _named(output):
            draft.mkdir(parents=True)
        yield draft
        with _named(output):
            draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """Turns an OSError of the block into one about `output`."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f"--output: {output} cannot be written: {e.strerror}") from e


@contextmanager
def _ranks(conversion: Conversion) -> Iterator[ConvertGroup]:
    """Ranks with the model."""
    placement = conversion.config.sized_placement
    places = Places(
        readable={"the model's folder": str(conversion.weights.absolute())},
        writable={"the output's folder": str(conversion.output.absolute().parent)},
    )
    with reserved_slots(placement, places, what="convert", name="a converter") as pool:
        group = ConvertGroup(conversion.config, pool)
        group.start_workers(conversion).result(placement.start_timeout_seconds)
        yield group
