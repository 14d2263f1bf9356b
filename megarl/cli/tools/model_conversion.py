"""Conversion between Hugging Face model folders and Megatron checkpoints.

Everything is checked first; then Megatron ranks read one format and write the other.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.cluster.placement.pool import SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.workers.dispatch import BROADCAST
from megarl.cluster.workers.group import WorkerFuture, WorkerGroup
from megarl.config import ConvertConfig
from megarl.controller.preflight.cluster_check import RequiredPaths
from megarl.controller.ray_session import reserved_slots
from megarl.errors import ConfigError, DataError
from megarl.megatron.checkpoint.checkpoint_files import COMPANIONS, UntrustedIndexError, find_weights, read_index
from megarl.megatron.command_workers import ConvertWorker
from megarl.megatron.families.architecture import Head, ModelArchitecture
from megarl.megatron.families.load_architecture import (
    find_folder_notices,
    find_weight_problems,
    load_architecture_from_folder,
    require_family,
)
from megarl.megatron.families.trainer_layouts import parallel_problems
from megarl.megatron.requests import ModelSpec
from megarl.model_files.header import itemsize
from megarl.model_files.hub import local_model
from megarl.model_files.quantization import VALUES_DTYPE
from megarl.model_files.weight_index import read_headers
from megarl.run.remote.trainer_group import make_rank_processes

MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""Prefixes of the weights' names in a checkpoint, which may also contain optimizer state."""

BASE_TIMEOUT_SECONDS = 600.0
MIN_DISK_BYTES_PER_SECOND = 10 * 2**20
"""Assumed disk bandwidth in bytes per second, for the timeout of ranks that wait for others to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A checked conversion, ready to run."""

    config: ConvertConfig
    description: Path
    """Folder with config.json, tokenizer and whatever else accompanies the weights."""
    weights: Path
    read: Callable[[ConvertWorker, str], None]
    write: Callable[[ConvertWorker, str], None]
    output: Path
    head: Head
    family: str | None
    """Import path of the model's family, if that is outside the package."""
    dtype: str
    num_bytes: int
    """Size of the weights in `dtype`."""
    notices: tuple[str, ...] = ()
    """Messages for the user about the folder (`find_folder_notices`)."""

    def run(self, report: Callable[[str], None]) -> float:
        """Write `output`, which appears once it is complete, and return the duration in seconds.

        Args:
            report: receives the name of each phase.

        Raises:
            MegarlError: a rank failed, or the output cannot be written. There is no output then.
        """
        started = time.perf_counter()
        with _temporary_output(self.output) as draft:
            report(f"starting {self.config.sized_placement.slots} ranks")
            with started_group(self) as group:
                report("reading")
                group.call(self.read, str(self.weights.absolute()), dispatch=BROADCAST)
                report("writing")
                group.call(self.write, str(draft.absolute()), dispatch=BROADCAST)
        return time.perf_counter() - started


class ConvertGroup(WorkerGroup[ConvertWorker]):
    """Megatron ranks, one per slot, that read and write weights."""

    def __init__(self, config: ConvertConfig, pool: SlotPool) -> None:
        grid = RankGrid.of(config.trainer.parallel, config.sized_placement.slots)
        super().__init__("converter", make_rank_processes(pool, "converter"), grid)

    def start_workers(self, conversion: Conversion) -> WorkerFuture[None]:
        """Start building the model on every rank."""
        spec = ModelSpec(
            model_path=str(conversion.description.absolute()),
            family=conversion.family,
            dtype=conversion.dtype,
            head=conversion.head,
            parallel=conversion.config.trainer.parallel,
            timeout_seconds=BASE_TIMEOUT_SECONDS + conversion.num_bytes / MIN_DISK_BYTES_PER_SECOND,
        )
        return self.start(ConvertWorker, (spec,))


def plan_import(
    config: ConvertConfig, folder: Path, output: Path, dtype: str, *, family: str | None = None
) -> Conversion:
    """Check and plan the conversion of the model in `folder`, or of that hub id, to the Megatron checkpoint `output`.

    Args:
        dtype: `float32`, `bfloat16`, or `auto`: the smaller of these that represents every stored weight exactly, and
            bfloat16 for quantized weights, whose products with their scales are rounded.
        family: import path of the model's family, if that is outside the package.

    Raises:
        ConfigError, DataError: all problems of the folder, the parallel sizes and the output.
    """
    folder = Path(local_model(str(folder), key="--model"))
    require_family(str(folder), family, key="--family")
    try:
        model = load_architecture_from_folder(folder, head=None, family=family)
    except (ConfigError, DataError) as e:
        raise type(e)(f"--model: {e}") from e
    problems = [f"--model: {problem}" for problem in find_weight_problems(folder, model)]
    problems += [*_layout_problems(config, model), *_output_problems(output)]
    if problems:
        raise ConfigError("\n".join(problems))
    stored = {name: tensor.dtype for name, tensor in read_headers(folder).items()}
    # leave out tensors with a fixed dtype, independent of the model's
    free = [name for name, spec in model.tensors("bfloat16").items() if spec.dtype == "bfloat16"]
    dtype = _smallest_dtype(stored[name] for name in free) if dtype == "auto" else dtype
    _require_space(output, num_bytes := _num_bytes(model, dtype))
    return Conversion(
        config=config,
        description=folder,
        weights=folder,
        read=ConvertWorker.read_hf,
        write=ConvertWorker.write_checkpoint,
        output=output,
        head=model.head,
        family=family,
        dtype=dtype,
        num_bytes=num_bytes,
        notices=tuple(find_folder_notices(folder, head=None, family=family)),
    )


def plan_export(
    config: ConvertConfig,
    root: Path,
    output: Path,
    dtype: str,
    *,
    family: str | None = None,
    trust: bool = False,
) -> Conversion:
    """Check and plan the conversion of the Megatron checkpoint `root` to the model folder `output`.

    Other arguments, and errors, are those of `plan_import`.

    Args:
        trust: read the checkpoint even if its index may execute code of its author.
    """
    description = root / COMPANIONS
    require_family(str(description), family, key="--family")
    try:
        weights = find_weights(root)
        index = read_index(weights, trust=trust)
        model = load_architecture_from_folder(description, head=None, family=family)
    except UntrustedIndexError as e:
        raise UntrustedIndexError(f"--model: {e}: pass --trust if you trust the author") from e
    except (ConfigError, DataError) as e:
        raise type(e)(f"--model: {e}") from e
    problems = [*_layout_problems(config, model), *_output_problems(output)]
    if problems:
        raise ConfigError("\n".join(problems))
    if dtype == "auto":
        # the expert bias is float32 whatever the model's dtype is
        weights_only = [name for name in index if name.startswith(MODEL_PREFIXES) and not name.endswith("expert_bias")]
        dtype = _smallest_dtype(index[name].dtype for name in weights_only)
    _require_space(output, num_bytes := _num_bytes(model, dtype))
    return Conversion(
        config=config,
        description=description,
        weights=weights,
        read=ConvertWorker.read_trusted_checkpoint if trust else ConvertWorker.read_checkpoint,
        write=ConvertWorker.write_hf,
        output=output,
        head=model.head,
        family=family,
        dtype=dtype,
        num_bytes=num_bytes,
    )


def _layout_problems(config: ConvertConfig, model: ModelArchitecture) -> Iterator[str]:
    return parallel_problems(model, config.trainer.parallel, config.sized_placement.slots)


def _output_problems(output: Path) -> Iterator[str]:
    if output.exists() and not output.is_dir():
        yield f"--output: needs a folder that is empty or not there yet, {output} is a file"
        return
    parent = _existing_parent(output)  # the temporary folder is created in the same parent
    if not os.access(parent, os.R_OK | os.W_OK | os.X_OK) or not parent.is_dir():
        yield f"--output: {output} needs a folder that can be written, {parent} cannot"
    elif output.exists() and (num_files := len(list(output.iterdir()))):
        yield f"--output: needs a folder that is empty or not there yet, {output} holds {num_files} files"


def _require_space(output: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(_existing_parent(output)).free
    if free < num_bytes:
        raise ConfigError(f"--output: the weights need {num_bytes} bytes, {output} has {free} free")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _smallest_dtype(dtypes: Iterable[str]) -> str:
    return "bfloat16" if set(dtypes) <= {"bfloat16", VALUES_DTYPE} else "float32"


def _num_bytes(model: ModelArchitecture, dtype: str) -> int:
    return sum(prod(spec.shape) * itemsize(spec.dtype) for spec in model.tensors(dtype).values())


@contextmanager
def _temporary_output(output: Path) -> Iterator[Path]:
    """Create a temporary folder next to `output`, renamed to `output` if the block succeeds and removed otherwise."""
    output = output.absolute()
    draft = output.with_name(f".{output.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)  # left by a conversion that was killed
    try:
        with _os_error_as_config_error(output):
            draft.mkdir(parents=True)
        yield draft
        with _os_error_as_config_error(output):
            draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _os_error_as_config_error(output: Path) -> Iterator[None]:
    """Raise an OSError of the block as a ConfigError about --output."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f"--output: {output} cannot be written: {e.strerror}") from e


@contextmanager
def started_group(conversion: Conversion) -> Iterator[ConvertGroup]:
    """Reserve slots and start ranks with the model for the duration of the block."""
    placement = conversion.config.sized_placement
    places = RequiredPaths(
        readable={"the model's folder": str(conversion.weights.absolute())},
        writable={"the output's folder": str(conversion.output.absolute().parent)},
    )
    with reserved_slots(placement, places, what="convert", name="a converter") as pool:
        group = ConvertGroup(conversion.config, pool)
        group.start_workers(conversion).result(placement.start_timeout_seconds)
        yield group
