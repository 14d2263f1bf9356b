"""Exports by real ranks with megatron-core's layouts, compared with the folder that the weights came from."""

from __future__ import annotations

import json
import resource
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config.trainer import ParallelConfig
from megarl.errors import DataError, LostLockError
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from tests.megatron.ranks import run_ranks

GRIDS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}


@dataclass
class FakeModel:
    """The part of `MegatronModel` that `save` uses."""

    layout: WeightLayout
    values: dict[str, torch.Tensor]
    architecture = SimpleNamespace(duplicated_tensors=dict, head="lm", num_mtp_layers=0)

    def tensors(self):
        return self.values


def shard(layout, tensors):
    """Cut the rank's shards out of full tensors."""
    shapes = defaultdict(list)
    for piece in layout.pieces:
        shapes[piece.local].append([stop for _, stop in piece.local_box])
    dtype = {p.local: getattr(torch, layout.tensors[p.tensor].dtype) for p in layout.pieces}
    values = {
        name: torch.full([max(dim) for dim in zip(*stops, strict=True)], 0.5, dtype=dtype[name])
        for name, stops in shapes.items()
    }
    for piece in layout.pieces:
        values[piece.local][slices(piece.local_box)] = tensors[piece.tensor][slices(piece.box)].to(dtype[piece.local])
    return FakeModel(layout, values)


def load_folder(folder):
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def export_on_rank(source, companions, target, grid, dtype, file_bytes, faulty_rank, num_lock_checks):
    """Export; return, by rank, the files written and the error."""
    from megarl.megatron.hf_weights import export, export_plan

    dist.init_process_group("gloo")
    rank, wrote = dist.get_rank(), []
    export.BUCKET_BYTES, export_plan.FILE_BYTES = 20_000, file_bytes
    model = load_architecture(json.loads((Path(source) / "config.json").read_text()), origin=source)
    held = shard(trainer_layouts(model, grid, dtype)[rank], load_folder(source))
    finish = export.SafetensorsWriter.finish

    def finish_and_record(writer):
        finish(writer)
        wrote.extend(file.name for file in writer._files.values())

    export.SafetensorsWriter.finish = finish_and_record
    if rank == faulty_rank:  # simulates a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checks = iter(range(num_lock_checks))

    def require_lock():
        if rank == 0 and next(checks, None) is None:
            raise LostLockError("another run holds the folder")

    error = None
    try:
        export.save(held, companions, target, require_lock=require_lock)
    except DataError as e:
        error = str(e)
    except LostLockError as e:
        error = f"LostLockError: {e}"
    outcomes = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (wrote, error))
    dist.destroy_process_group()
    return outcomes


def export(
    tmp_path,
    source,
    *,
    dtype="float32",
    file_bytes=60_000,
    faulty_rank=None,
    companions=None,
    num_lock_checks=9,
    **sizes,
):
    grid = RankGrid(**sizes)
    arguments = companions or source, str(tmp_path / "out"), grid, dtype, file_bytes, faulty_rank, num_lock_checks
    return run_ranks(export_on_rank, grid.size, tmp_path, source, *arguments)


def same_bits(folder, source, dtype=torch.float32):
    got, want = load_folder(folder), load_folder(source)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.to(dtype).view(torch.uint8)), name


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 331, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24}
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=4
    )
    path = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("grid", GRIDS)
def test_export_is_bitwise_equal_to_the_import(grid, qwen3_path, tmp_path):
    outcomes = export(tmp_path, qwen3_path, **GRIDS[grid])
    assert [error for _, error in outcomes] == [None] * len(outcomes)
    same_bits(tmp_path / "out", qwen3_path)
    written = [name for names, _ in outcomes for name in names]
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(written) == files
    assert len(files) > len(outcomes)
    assert all(names for names, _ in outcomes)
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == []


def test_pipeline_stage_writes_its_own_layers(qwen3_path, tmp_path):
    (first, _), (last, _) = export(tmp_path, qwen3_path, pp=2)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    first_stage = {name for name, file in index.items() if file in first}
    assert first_stage == {n for n in index if n.startswith(("model.layers.0.", "model.embed_tokens"))}
    assert {name for name, file in index.items() if file in last} == index.keys() - first_stage


def test_exports_experts_and_tied_embeddings(moe_path, qwen2_tied_path, tmp_path):
    for number, (source, sizes) in enumerate([(moe_path, {"dp": 2, "ep": 2}), (qwen2_tied_path, {"pp": 2})]):
        (tmp_path / str(number)).mkdir()
        outcomes = export(tmp_path / str(number), source, **sizes)
        assert [error for _, error in outcomes] == [None, None]
        same_bits(tmp_path / str(number) / "out", source)


def test_transformers_loads_the_export_in_its_dtype(qwen3_path, tmp_path):
    from transformers import AutoModelForCausalLM

    export(tmp_path, qwen3_path, dtype="bfloat16", tp=2)
    same_bits(tmp_path / "out", qwen3_path, torch.bfloat16)
    config, source = (json.loads((Path(p) / "config.json").read_text()) for p in (tmp_path / "out", qwen3_path))
    assert {key for key in config if config[key] != source.get(key)} == {"dtype"}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert loaded.dtype == torch.bfloat16
    want = AutoModelForCausalLM.from_pretrained(qwen3_path, dtype=torch.bfloat16)
    ids = torch.arange(2, 60)[None]
    assert torch.equal(loaded(ids).logits, want(ids).logits)


def test_small_model_is_one_file_and_replaces_the_previous_export(qwen3_path, tmp_path):
    out = tmp_path / "out"
    export(tmp_path, qwen3_path, tp=2)
    assert len(list(out.glob("*.safetensors"))) > 2
    (Path(qwen3_path) / "tokenizer.json").write_text("{}")
    export(tmp_path, qwen3_path, file_bytes=2**30, tp=2)
    same_bits(out, qwen3_path)
    (Path(qwen3_path) / "tokenizer.json").unlink()
    names = {path.name for path in out.iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


def test_error_names_the_rank_that_cannot_write_and_the_previous_model_stays(qwen3_path, qwen2_tied_path, tmp_path):
    out = tmp_path / "out"
    export(tmp_path, qwen2_tied_path, tp=2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    outcomes = export(tmp_path, qwen3_path, faulty_rank=1, tp=2)
    message = f"{out}: the model could not be written, on rank 1: [Errno 27] File too large"
    assert [error for _, error in outcomes] == [message, message]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("num_lock_checks", [0, 1])
def test_run_that_lost_its_folder_keeps_the_previous_model(num_lock_checks, qwen3_path, qwen2_tied_path, tmp_path):
    """The folder is lost before the export, or while the files are written."""
    out = tmp_path / "out"
    export(tmp_path, qwen2_tied_path, tp=2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    outcomes = export(tmp_path, qwen3_path, num_lock_checks=num_lock_checks, tp=2)
    assert [error for _, error in outcomes] == ["LostLockError: another run holds the folder"] * 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_source_without_config_json_raises_before_anything_is_written(qwen3_path, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    outcomes = export(tmp_path, qwen3_path, companions=str(bare), tp=2)
    assert outcomes[0][1].endswith("config.json cannot be read: No such file or directory")
    assert outcomes[0][1] == outcomes[1][1]
    assert list((tmp_path / "out").iterdir()) == []


def model_on_rank(source, target, parallel):
    from megarl.megatron.hf_weights import export, export_plan
    from megarl.megatron.runtime import platform

    platform.prepare()
    from megarl.megatron.modeling.megatron_model import MegatronModel
    from megarl.megatron.requests import ModelSpec

    export.BUCKET_BYTES, export_plan.FILE_BYTES = 20_000, 60_000
    export.save(MegatronModel(ModelSpec(model_path=source, dtype="float32", parallel=parallel)), source, target)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", {"tp": 2}),
        ("gemma2", {"pp": 2, "vpp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}),
        ("mixtral", {"ep": 2}),
        ("deepseek_v3", {"pp": 2}),
        ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    ],
    ids=str,
)
def test_megatron_model_exports_what_it_loaded(name, sizes, model_folder, tmp_path):
    source = model_folder(name)
    run_ranks(model_on_rank, 2, tmp_path, source, str(tmp_path / "out"), ParallelConfig(**sizes))
    same_bits(tmp_path / "out", source)


MB = 2**20


def memory_on_rank(source, target):
    """Export; return the maximum over ranks of the peak memory it took, in bytes, and sums of each rank's shards."""
    from megarl.megatron.hf_weights import export, export_plan

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    export.BUCKET_BYTES, export_plan.FILE_BYTES = 16 * MB, 48 * MB
    specs = {f"w{i}": TensorSpec((4096, 2048), "float32") for i in range(8)}
    pieces = [ShardPiece(n, ((0, 4096), (1024 * rank, 1024 * (rank + 1))), n, ((0, 4096), (0, 1024))) for n in specs]
    held = FakeModel(WeightLayout(specs, tuple(pieces)), {n: torch.rand(4096, 1024) for n in specs})
    small = {"s": TensorSpec((8, 8), "float32")}
    full_box = ((0, 8), (0, 8))
    # a first export, so that one-time allocations are not counted
    export.save(
        FakeModel(WeightLayout(small, (ShardPiece("s", full_box, "s", full_box),)), {"s": torch.rand(8, 8)}),
        source,
        target,
    )
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before = status("VmRSS")
    export.save(held, source, target)
    peaks = [None] * 2
    dist.all_gather_object(peaks, status("VmHWM") - before)
    shards = [None] * 2
    dist.all_gather_object(shards, {n: t.sum().item() for n, t in held.values.items()})
    dist.destroy_process_group()
    return max(peaks), shards


def status(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def test_export_needs_memory_for_two_buckets(qwen3_path, tmp_path):
    peak, shards = run_ranks(memory_on_rank, 2, tmp_path, qwen3_path, str(tmp_path / "out"))
    # each rank writes 128 MB; the receive bucket is mapped twice, for the transport and for the files
    assert peak < 3 * 16 * MB + 16 * MB
    tensors = load_folder(tmp_path / "out")
    for rank, sums in enumerate(shards):
        half = slice(1024 * rank, 1024 * (rank + 1))
        assert {name: t[:, half].contiguous().sum().item() for name, t in tensors.items()} == sums
