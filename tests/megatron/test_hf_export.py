"""Exports by real ranks in megatron-core's layouts, compared with the folder that the weights came from."""

import json
import mmap
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.errors import DataError, LostLockError
from tests.megatron.fidelity.models import OWN_HEAD, TWO_DTYPES
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks, sample

BUCKET, JOINED = 20_000, 4096
"""Bytes of a transfer bucket, and of the rows from several ranks that are joined before they are written."""


def load_folder(folder):
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def export_on_rank(spec, target, options):
    return export_with(spec, target, **options)


def export_with(spec, target, file_bytes=60_000, faulty_rank=None, companions=None, num_lock_checks=9):
    """Export; return, by rank, the files written, the error, and the memory for transfers and for writes, in bytes."""
    model = make_model(spec)
    from megarl.megatron import hf_export

    rank, wrote, memory = dist.get_rank(), [], {"transfer": 0, "written from": set()}
    hf_export.BUCKET_BYTES, hf_export.FILE_BYTES, hf_export.MAX_JOINED_ELEMENTS = BUCKET, file_bytes, JOINED // 4
    writer_class, push = hf_export.SafetensorsWriter, hf_export.BoxStrategy.push
    finish, write = writer_class.finish, writer_class.write

    def finish_and_record(writer):
        finish(writer)
        wrote.extend(file.name for file in writer.files.values())

    def write_and_record(writer, name, box, tensor):
        memory["written from"].add(tensor.untyped_storage().nbytes())
        write(writer, name, box, tensor)

    def push_and_record(*arguments):
        memory["transfer"] = push(*arguments).peak_extra_bytes

    writer_class.finish, writer_class.write = finish_and_record, write_and_record
    hf_export.BoxStrategy.push = push_and_record
    if rank == faulty_rank:  # simulates a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checks = iter(range(num_lock_checks))

    def require_lock():
        if rank == 0 and next(checks, None) is None:
            raise LostLockError("another run holds the folder")

    error = None
    try:
        hf_export.save(model, companions or spec.model_path, target, require_lock=require_lock)
    except (DataError, LostLockError) as e:
        error = f"{type(e).__name__}: {e}"
    return gather((wrote, error, memory))


def export(tmp_path, source, *, dtype="float32", options=None, **sizes):
    """Export to the folder `out` with options of `export_on_rank`."""
    spec, target = model_spec(source, sizes, dtype=dtype), str(tmp_path / "out")
    return run_ranks(export_on_rank, spec.parallel.min_world_size, tmp_path, spec, target, options or {})


def errors_of(outcomes):
    return [error for _, error, _ in outcomes]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_bits(folder, source, dtype=None):
    """Check that two folders have the same tensors, `source` after conversion to `dtype`."""
    got, want = load_folder(folder), load_folder(source)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        tensor = tensor.to(dtype or tensor.dtype)
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


MODELS = [
    ("qwen2", {"pp": 2}),
    ("qwen3", {"tp": 2}),
    ("qwen3", {"tp": 2, "pp": 2}),
    ("gemma2", {"pp": 2, "vpp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}),
    ("mixtral", {"ep": 2}),
    ("deepseek_v3", {"pp": 2}),
    (OWN_HEAD, {"tp": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}),
    ("deepseek_v32", {"tp": 2, "ep": 2, "etp": 1}),
    ("glm_moe_dsa", {"pp": 2}),
    ("gpt_oss", {"tp": 2, "ep": 2, "etp": 2}),
]
DEFAULT = [MODELS[0], MODELS[2], MODELS[5], MODELS[9], MODELS[11]]


@pytest.mark.parametrize(("name", "sizes"), sample(MODELS, DEFAULT), ids=str)
def test_export_is_bitwise_equal_to_the_import(name, sizes, model_folder, tmp_path):
    """An export needs memory for two buckets: one that is received, and one that is sent."""
    source = model_folder(name)
    outcomes = export(tmp_path, source, **sizes)
    assert errors_of(outcomes) == [None] * len(outcomes)
    same_bits(tmp_path / "out", source)
    written = [file for files, _, _ in outcomes for file in files]
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(written) == files
    assert len(files) > len(outcomes)
    assert sorted(path.name for path in (tmp_path / "out").glob(".*")) == []
    for wrote, _, memory in outcomes:
        assert wrote
        assert 0 < memory["transfer"] <= 2 * BUCKET + 4 * mmap.PAGESIZE
        received = max(memory["written from"])
        assert received <= BUCKET + mmap.PAGESIZE
        assert all(size <= JOINED for size in memory["written from"] - {received})


def test_tensors_keep_the_dtypes_of_the_folder(model_folder, tmp_path):
    source = model_folder(TWO_DTYPES)
    assert errors_of(export(tmp_path, source, dtype="bfloat16", tp=2)) == [None, None]
    same_bits(tmp_path / "out", source)
    assert {tensor.dtype for tensor in load_folder(source).values()} == {torch.float32, torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_pipeline_stage_writes_its_own_layers(qwen3_path, tmp_path):
    (first, *_), (last, *_) = export(tmp_path, qwen3_path, pp=2)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    first_stage = {name for name, file in index.items() if file in first}
    assert first_stage == {n for n in index if n.startswith(("model.layers.0.", "model.embed_tokens"))}
    assert {name for name, file in index.items() if file in last} == index.keys() - first_stage


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
    export(tmp_path, qwen3_path, options={"file_bytes": 2**30}, tp=2)
    same_bits(out, qwen3_path)
    (Path(qwen3_path) / "tokenizer.json").unlink()
    names = {path.name for path in out.iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}


def test_error_names_the_rank_that_cannot_write_and_the_previous_model_stays(qwen3_path, model_folder, tmp_path):
    out = tmp_path / "out"
    export(tmp_path, model_folder("qwen2"), tp=2)
    before = files_in(out)
    outcomes = export(tmp_path, qwen3_path, options={"faulty_rank": 1}, tp=2)
    message = f"DataError: {out}: the model could not be written, on rank 1: [Errno 27] File too large"
    assert errors_of(outcomes) == [message, message]
    assert files_in(out) == before


@pytest.mark.parametrize("num_lock_checks", [0, 1])
def test_run_that_lost_its_folder_keeps_the_previous_model(num_lock_checks, qwen3_path, model_folder, tmp_path):
    """The folder is lost before the export, or while the files are written."""
    out = tmp_path / "out"
    export(tmp_path, model_folder("qwen2"), tp=2)
    before = files_in(out)
    outcomes = export(tmp_path, qwen3_path, options={"num_lock_checks": num_lock_checks}, tp=2)
    assert errors_of(outcomes) == ["LostLockError: another run holds the folder"] * 2
    assert files_in(out) == before


def test_source_without_config_json_raises_before_anything_is_written(qwen3_path, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    error, other = errors_of(export(tmp_path, qwen3_path, options={"companions": str(bare)}, tp=2))
    assert error.endswith("config.json cannot be read: No such file or directory")
    assert error == other
    assert list((tmp_path / "out").iterdir()) == []
