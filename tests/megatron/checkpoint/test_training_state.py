"""Training state checkpoints: bitwise exact resume in the same layout, same tensors in other layouts."""

import hashlib
import json
import os
import pickle
import resource
import signal
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.errors import DataError
from megarl.losses import ValueLoss
from megarl.megatron.requests import SaveRequest
from megarl.megatron.trainer_worker import TrainerWorker
from tests.megatron.fidelity.measure import nll_request
from tests.megatron.fidelity.models import TWO_DTYPES
from tests.megatron.fidelity.reference import draw
from tests.megatron.rank_models import gather, model_spec, train_step, trainer_spec
from tests.megatron.ranks import run_ranks
from tests.time_limits import HANG_SECONDS

LENGTHS = (5, 9, 21, 34, 40, 18)
VOCAB = 331


def make_worker(path, dtype="float32", distributed=True, head="lm", offload_when_idle=False, weights="hf", **parallel):
    fields = {"dtype": dtype, "head": head, "offload_when_idle": offload_when_idle, "weights": weights}
    schedule = {"lr": 1e-2, "min_lr": 1e-3, "decay": "cosine", "warmup_steps": 2}
    return TrainerWorker(trainer_spec(model_spec(path, parallel, **fields), distributed=distributed, **schedule))


def train(worker, step):
    """Train one step; return its metrics, the same on all ranks."""
    work = nll_request(draw(LENGTHS, VOCAB, seed=step), 64)
    if worker.spec.model.head == "value":
        (batch,) = work.mini_batches
        samples = tuple(replace(sample, scalars={"values": 0.0, "returns": 1.0}) for sample in batch.samples)
        work = replace(work, mini_batches=(replace(batch, samples=samples),), loss=ValueLoss(clip=None))
    metrics = train_step(worker, work)
    return {name: metrics[name] for name in ("loss", "grad_norm", "learning_rate")}


def save(worker, folder, *, asynchronous=False, limit=None):
    request = SaveRequest(folder=str(folder), asynchronous=asynchronous, max_staging_bytes=limit)
    return worker.begin_save(request), worker.finish_save(None)


def full_state(worker):
    """All state of this rank that influences further training."""
    from megarl.megatron.checkpoint.training_state import collect_rng_states

    trainer = worker.trainer
    trainer.memory.onload()
    held = {f"weight {name}": t for name, t in trainer.model.tensors().items()}
    for number, (_, of) in enumerate(trainer.optimizer.state.items()):
        held |= {f"{name} {number}": t for name, t in of.items()} if isinstance(of, dict) else {f"state {number}": of}
    for number, group in enumerate(trainer.optimizer.param_groups):
        held |= {f"main {number} {i}": p for i, p in enumerate(group["params"])}
        held[f"group {number}"] = torch.tensor([group["lr"], group["weight_decay"]], dtype=torch.float64)
    held["scheduled"] = torch.tensor(trainer.scheduler.num_steps)
    generators = collect_rng_states(trainer.model)
    held |= {f"generator {name}": generators[name] for name in ("host", "device")}
    held["generator numpy"] = generators["numpy"]["state"]["key"]
    return {name: t.detach().clone() for name, t in held.items()}


def differences(got, want):
    assert got.keys() == want.keys()
    return [name for name, tensor in want.items() if not torch.equal(got[name], tensor)]


def error_of(call, *arguments):
    """Call `call`; return the error message of every rank, None if it raised nothing."""
    try:
        call(*arguments)
    except DataError as e:
        return gather(str(e))
    return gather(None)


def index_of(folder):
    return pickle.loads((Path(folder) / ".metadata").read_bytes())


def stored_bytes(folder):
    tensors = index_of(folder).state_dict_metadata.values()
    return sum(prod(t.size) * t.properties.dtype.itemsize for t in tensors)


def read_with_torch(folder):
    """Read all tensors with torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tensors = {}
    _load_state_dict(tensors, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tensors


def different_tensors(got, want):
    """Names of the tensors that differ, padding rows of the vocabulary aside."""
    rows = {name: VOCAB if name.endswith(VOCABULARY) else len(tensor) for name, tensor in want.items()}
    assert got.keys() == want.keys()
    return [name for name, tensor in want.items() if not torch.equal(got[name][: rows[name]], tensor[: rows[name]])]


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

RESUME_CASES = {
    "dp2": ("qwen3", {}),
    "dp2 bfloat16 replicated": ("qwen3", {"dtype": "bfloat16", "distributed": False}),
    "tp2": ("deepseek_v3", {"tp": 2}),
    "vpp2 tied bfloat16": ("qwen2", {"pp": 2, "vpp": 2, "dtype": "bfloat16"}),
    "dp2 two dtypes": (TWO_DTYPES, {"dtype": "bfloat16", "offload_when_idle": True}),
    "ep2 bfloat16, offloaded": ("qwen3_moe", {"ep": 2, "dtype": "bfloat16", "offload_when_idle": True}),
}
MORE_RESUME_CASES = {
    "dp2 replicated": ("qwen3", {"distributed": False}),
    "dp2 bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "dp2 replicated two dtypes": (TWO_DTYPES, {"dtype": "bfloat16", "distributed": False}),
    "tp2 two dtypes": (TWO_DTYPES, {"dtype": "bfloat16", "tp": 2}),
    "pp2": ("qwen2", {"pp": 2}),
    "ep2": ("deepseek_v3", {"ep": 2}),
    "values": ("deepseek_v3", {"head": "value", "tp": 2}),
}


def resume_on_rank(cases, root):
    """By case and rank, what differs from an uninterrupted run; cases without differences are left out."""
    wrong = {}
    for name, (path, options) in cases.items():
        folder = Path(root) / name
        worker = make_worker(path, **options)
        for step in range(2):
            train(worker, step)
        save(worker, folder)
        want = [train(worker, step) for step in (2, 3)]
        other = make_worker(path, **options)
        torch.rand(3)
        report = other.load_training(str(folder))
        assert report.same_layout
        got = [train(other, step) for step in (2, 3)]
        found = differences(full_state(other), full_state(worker))
        every = report.bytes, sum(gather(report.bytes)), stored_bytes(folder)
        found += [] if reads_no_more_than_needed(name, *every) else [f"bytes: {every}"]
        wrong[name] = gather(found + ([] if got == want else [f"{got} {want}"]))
    return {name: of for name, of in wrong.items() if any(of)}


def reads_no_more_than_needed(name, here, all_ranks, stored):
    """With a distributed optimizer, ranks read each value once in total; with a replicated one, each reads all."""
    if name.startswith("dp2"):
        return all_ranks == (2 * stored if "replicated" in name else stored)
    return here < 0.9 * stored


@pytest.mark.parametrize(
    "which", [RESUME_CASES, pytest.param(MORE_RESUME_CASES, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_resume_in_the_same_layout_is_bitwise_exact(which, model_folder, value_folder, tmp_path):
    cases = {
        name: ((value_folder if options.get("head") else model_folder)(model), options)
        for name, (model, options) in which.items()
    }
    assert run_ranks(resume_on_rank, 2, tmp_path, cases, str(tmp_path)) == {}
    for name, (_, options) in cases.items():
        check_index(tmp_path / name, has_mains=options.get("dtype") == "bfloat16")
        if name.startswith("dp2"):
            first, second = bytes_by_file(tmp_path / name)
            assert abs(first - second) < 0.02 * (first + second), name


def bytes_by_file(folder):
    index, found = index_of(folder), {}
    for place, stored in index.storage_data.items():
        tensor = index.state_dict_metadata[place.fqn]
        num_bytes = prod(tensor.chunks[place.index].sizes) * tensor.properties.dtype.itemsize
        found[stored.relative_path] = found.get(stored.relative_path, 0) + num_bytes
    return list(found.values())


def box_slices(offsets, sizes):
    return tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))


def check_index(folder, *, has_mains):
    """Check that chunks fill each tensor without overlap, and that each weight has its optimizer state."""
    index = index_of(folder)
    for name, tensor in index.state_dict_metadata.items():
        count = torch.zeros(tensor.size, dtype=torch.int8)
        for chunk in tensor.chunks:
            count[box_slices(chunk.offsets, chunk.sizes)] += 1
        assert (count == 1).all(), name
    assert len(index.storage_data) == sum(len(t.chunks) for t in index.state_dict_metadata.values())
    state = {name for name in index.state_dict_metadata if name.startswith("optimizer.")}
    trained = {name for name in index.state_dict_metadata if name not in state and not name.startswith("mtp.")}
    trained -= {name for name in trained if name.endswith("expert_bias") or ".indexer." in name}
    of_kind = dict.fromkeys(("exp_avg", "exp_avg_sq"), trained)
    if has_mains:
        dtypes = {name: index.state_dict_metadata[name].properties.dtype for name in trained}
        of_kind["param"] = {name for name in trained if dtypes[name] == torch.bfloat16}
    assert state == {f"optimizer.state.{kind}.{name}" for kind, names in of_kind.items() for name in names}
    sizes = {name: prod(tensor.size) for name, tensor in index.state_dict_metadata.items()}
    assert sum(sizes[name] for name in state) == sum(sizes[name] for names in of_kind.values() for name in names)


CHAINS = {
    "dense": ("qwen3", ({"tp": 2}, {"pp": 2}, {}, {"distributed": False})),
    "experts": ("deepseek_v32", ({"ep": 2}, {"tp": 2})),
}
BFLOAT16 = ("qwen2", ({"tp": 2}, {"distributed": False}, {"pp": 2}))
IN_TWO_DTYPES = (TWO_DTYPES, ({}, {"tp": 2}, {"distributed": False}))
WIDE = {
    "dense": ("qwen3", ({}, {"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2, "distributed": False}, {"cp": 2}, {})),
    "experts": (
        "deepseek_v3",
        ({"ep": 2}, {"tp": 2}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2}, {"distributed": False}),
    ),
    "routed": ("qwen3_moe", ({"ep": 2}, {"tp": 2, "pp": 2}, {"ep": 4, "distributed": False}, {"pp": 2})),
}


def chain_on_rank(chains, root, dtype):
    """Train and save in the first layout, then load and save in each other; return the metrics of the next steps."""
    out = {}
    for name, (path, layouts) in chains.items():
        metrics = []
        for number, options in enumerate(layouts):
            worker = make_worker(path, dtype=dtype, **options)
            if number == 0:
                for step in range(2):
                    train(worker, step)
            else:
                report = worker.load_training(f"{root}/{name} {number - 1}")
                before = layouts[number - 1] | {"distributed": options.get("distributed", True)}
                assert report.same_layout == ({"distributed": True} | options == before)
            save(worker, f"{root}/{name} {number}")
            metrics.append([train(worker, step) for step in (2, 3)])
        out[name] = metrics
    return out


def check_chains(model_folder, tmp_path, chains, world=2, dtype="float32"):
    """Check that all checkpoints of a chain hold the same tensors; return the metrics of the next steps."""
    cases = {name: (model_folder(model), layouts) for name, (model, layouts) in chains.items()}
    out = run_ranks(chain_on_rank, world, tmp_path, cases, str(tmp_path), dtype)
    for name, (_, layouts) in chains.items():
        first = read_with_torch(tmp_path / f"{name} 0")
        assert all(first[key].any() for key in first)
        for number in range(1, len(layouts)):
            assert different_tensors(read_with_torch(tmp_path / f"{name} {number}"), first) == [], (name, number)
    return out


def check_next_steps(out):
    for name, (first, *others) in out.items():
        for number, metrics in enumerate(others, start=1):
            assert metrics[0]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5), (name, number)
            # the second step's loss depends on the moments
            assert metrics[1]["loss"] == pytest.approx(first[1]["loss"], rel=1e-4), (name, number)
            assert metrics[0]["learning_rate"] == first[0]["learning_rate"], (name, number)


def test_resume_in_another_layout(model_folder, tmp_path):
    check_next_steps(check_chains(model_folder, tmp_path, CHAINS))


def test_main_parameters_are_saved_with_bfloat16_weights(model_folder, tmp_path):
    check_chains(model_folder, tmp_path, {"tied": BFLOAT16, "two dtypes": IN_TWO_DTYPES}, dtype="bfloat16")


@pytest.mark.slow
def test_resume_in_another_layout_on_four_ranks(model_folder, tmp_path):
    check_next_steps(check_chains(model_folder, tmp_path, WIDE, world=4))


def names_on_rank(path, folder):
    """Save on one rank in small shards that megatron-core reads; return the second moment of each parameter."""
    from megarl.megatron.checkpoint import shards
    from megarl.megatron.checkpoint.model_state import load_model

    shards.MAX_SHARD_BYTES = 1000
    worker = make_worker(path, distributed=False)
    train(worker, 0)
    save(worker, folder)
    other = make_worker(path, weights="none")
    load_model(other.model, folder)
    assert differences(other.model.tensors(), worker.model.tensors()) == []
    trainer = worker.trainer
    ((chunk,), (member,)) = trainer.model.chunks, trainer.optimizer.chained_optimizers
    return {name: member.optimizer.state[p]["exp_avg_sq"] for name, p in chunk.module.named_parameters()}


def test_optimizer_state_is_named_after_its_parameter(model_folder, tmp_path):
    held = run_ranks(names_on_rank, 1, tmp_path, model_folder("qwen3"), str(tmp_path / "saved"))
    check_index(tmp_path / "saved", has_mains=False)
    sizes = [prod(c.sizes) for t in index_of(tmp_path / "saved").state_dict_metadata.values() for c in t.chunks]
    assert 900 < 4 * max(sizes) <= 1000
    stored = read_with_torch(tmp_path / "saved")
    for part in (
        "embedding.word_embeddings",
        "decoder.layers.2.self_attention.linear_qkv",
        "decoder.layers.1.mlp.linear_fc1",
    ):
        assert torch.equal(stored[f"optimizer.state.exp_avg_sq.{part}.weight"], held[f"{part}.weight"])


def background_on_rank(path, root):
    """Save each state synchronously and in the background, where writing waits until training has continued.

    Returns by step and rank: the staging limit, and statistics and saved files of both saves.
    """
    from megarl.megatron.checkpoint import background_writer

    write, go = background_writer.write_file, threading.Event()

    def write_later(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(HANG_SECONDS)
        return write(*arguments)

    background_writer.write_file = write_later
    worker = make_worker(path, dtype="bfloat16")
    train(worker, 0)
    saves = {}
    for step, share in enumerate((None, 0, 0.3, None), start=1):
        at_once = save(worker, f"{root}/{step} at once")
        limit = share if share is None else int(share * at_once[0].bytes)
        go.clear()
        request = SaveRequest(folder=f"{root}/{step} later", asynchronous=True, max_staging_bytes=limit)
        stats = worker.begin_save(request)
        assert not worker.is_save_written(None)
        train(worker, step)
        go.set()
        part = worker.finish_save(None)
        assert worker.is_save_written(None)
        saves[step] = gather((limit, at_once, (stats, part)))
    return saves


def test_background_save_writes_the_state_at_begin_save(model_folder, tmp_path):
    saves = run_ranks(background_on_rank, 2, tmp_path, model_folder("qwen3"), str(tmp_path))
    previous = None
    for step, of_ranks in saves.items():
        at_once, later = tmp_path / f"{step} at once", tmp_path / f"{step} later"
        tensors = read_with_torch(at_once)
        assert different_tensors(read_with_torch(later), tensors) == []
        assert previous is None or len(different_tensors(previous, tensors)) > len(tensors) / 2
        previous = tensors
        for rank, (limit, (stats, _), (later_stats, _)) in enumerate(of_ranks):
            assert stats.staging_bytes == 0
            assert stats.bytes == later_stats.bytes
            if limit is None:
                assert stats.bytes <= later_stats.staging_bytes < 1.3 * stats.bytes
                assert sha256(later / f"__{rank}_1.distcp") == sha256(at_once / f"__{rank}_0.distcp")
            else:
                assert 0.8 * limit <= later_stats.staging_bytes <= limit
                assert (later / f"__{rank}_0.distcp").stat().st_size >= later_stats.bytes - limit
            assert sha256(later / f"generators_{rank}.pt") == sha256(at_once / f"generators_{rank}.pt")
        assert stored_bytes(later) == sum(stats.bytes for _, (stats, _), _ in of_ranks)
        for folder, number in ((at_once, 1), (later, 2)):
            files = [file for each in of_ranks for file in each[number][1].files]
            assert sorted(file.name for file in files) == sorted(path.name for path in folder.iterdir())
            for file in files:
                assert (file.bytes, file.sha256) == ((folder / file.name).stat().st_size, sha256(folder / file.name))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def die(*_):
    raise MemoryError


def fail_on_rank(path, root):
    """By rank, errors of saves with a full disk on rank 1, an invalid folder, a dead thread; then save successfully."""
    from megarl.megatron.checkpoint import background_writer

    worker = make_worker(path)
    train(worker, 0)
    errors = []
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for number, (asynchronous, limit) in enumerate(((False, None), (True, None), (True, 100_000))):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, unlimited[1]))
        request = SaveRequest(folder=f"{root}/full {number}", asynchronous=asynchronous, max_staging_bytes=limit)
        worker.begin_save(request)
        errors.append(error_of(worker.finish_save, None))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    worker.begin_save(SaveRequest(folder=f"{root}/file"))
    errors.append(error_of(worker.finish_save, None))
    with patch.object(background_writer, "write_file", die if dist.get_rank() == 1 else background_writer.write_file):
        worker.begin_save(SaveRequest(folder=f"{root}/dead", asynchronous=True))
        errors.append(error_of(worker.finish_save, None))
    train(worker, 1)
    save(worker, f"{root}/valid", asynchronous=True)
    want = full_state(worker)
    other = make_worker(path)
    other.load_training(f"{root}/valid")
    assert differences(full_state(other), want) == []
    return errors


def test_error_names_the_rank_that_cannot_write_and_the_next_save_works(model_folder, tmp_path):
    (tmp_path / "file").write_text("")
    *full, no_folder, dead = run_ranks(fail_on_rank, 2, tmp_path, model_folder("qwen3"), str(tmp_path))
    for number, errors in enumerate(full):
        folder, file = tmp_path / f"full {number}", "__1_1" if number == 1 else "__1_0"
        why = f"the checkpoint could not be written, on rank 1: {folder}/{file}.distcp: File too large"
        assert errors == [f"{folder}: {why}"] * 2
        assert not (folder / ".metadata").exists()
    why = f"the checkpoint could not be written, on rank 0: {tmp_path}/file: File exists"
    assert no_folder == [f"{tmp_path}/file: {why}"] * 2
    why = f"on rank 1: {tmp_path}/dead: the writer thread has died; see stderr for the error"
    assert dead == [f"{tmp_path}/dead: the checkpoint could not be written, {why}"] * 2


def load_invalid_on_rank(path, other_path, fewer_layers, root):
    """By rank, errors of loading invalid checkpoints; also checks that the state stays unchanged."""
    from megarl.megatron.checkpoint.model_state import save_model

    worker = make_worker(path)
    train(worker, 0)
    save_model(worker.model, f"{root}/model alone")
    saved = {"other": {}, "16 bits": {"dtype": "bfloat16"}, "truncated": {}, "no generators": {}, "valid": {}}
    for name, options in saved.items():
        save(make_worker(other_path if name == "other" else path, **options), f"{root}/{name}")
    if dist.get_rank() == 0:
        os.truncate(f"{root}/truncated/__1_0.distcp", 5_000)
        Path(f"{root}/no generators/generators_1.pt").unlink()
    fewer = make_worker(fewer_layers, weights="none")
    for tensor in fewer.model.tensors().values():
        tensor.detach().zero_()
    fewer_before = {name: tensor.detach().clone() for name, tensor in fewer.model.tensors().items()}
    want = full_state(worker)
    errors = {
        name: error_of(worker.load_training, f"{root}/{name}")
        for name in ("model alone", "other", "16 bits", "truncated", "no generators", "nowhere")
    }
    errors["valid"] = error_of(fewer.load_training, f"{root}/valid")
    assert differences(full_state(worker), want) == []
    assert differences(fewer.model.tensors(), fewer_before) == []
    return errors


LOAD_ERRORS = {
    "valid": "{folder} is not a training state of this Qwen3ForCausalLM: the model has no decoder.layers.",
    "model alone": "{folder} holds only a model, needs a training state",
    "other": "decoder.layers.0.self_attention.linear_qkv.weight needs shape [160, 48], got [",
    "16 bits": " needs dtype float32, got bfloat16; ",
    "truncated": "{folder}/__1_0.distcp is cut short, its tensors need ",
    "no generators": "{folder}/generators_1.pt cannot be read: ",
    "nowhere": "{folder} is no distributed checkpoint of megatron-core: it has no metadata.json",
}


"""By saved folder; the model of `valid` has more layers than that which loads it."""


def test_invalid_checkpoint_raises_on_all_ranks_and_changes_nothing(model_folder, tmp_path):
    path = model_folder("qwen3")
    config = json.loads((Path(path) / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config |= {"layer_types": config["layer_types"][:-1]} if config.get("layer_types") else {}
    (tmp_path / "fewer").mkdir()
    (tmp_path / "fewer" / "config.json").write_text(json.dumps(config))
    folders = path, model_folder("qwen2"), str(tmp_path / "fewer"), str(tmp_path)
    errors = run_ranks(load_invalid_on_rank, 2, tmp_path, *folders)
    for name, message in LOAD_ERRORS.items():
        assert errors[name][0] == errors[name][1]
        assert message.format(folder=tmp_path / name) in errors[name][0]


@pytest.mark.parametrize("shape", [(7,), (4, 5), (1, 3, 4), (2, 3, 4), (3, 1, 2, 2)])
def test_range_is_cut_into_few_boxes(shape):
    from megarl.megatron.checkpoint.shards import cut_range

    tensor = torch.arange(prod(shape)).view(shape)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            boxes = list(cut_range(shape, start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
            values = [tensor[box_slices(box.offset, box.sizes)].flatten() for box in boxes]
            assert [int(each[0]) for each in values] == [box.start for box in boxes]
            assert [int(value) for each in values for value in each] == list(range(start, stop))


def test_replicated_values_are_split_evenly_by_bytes():
    from megarl.megatron.checkpoint.shards import split_evenly

    values = [(7, 12), (1, 12), (100, 4), (3, 14), (0, 2), (29, 14)]
    total = sum(count * each for count, each in values)
    for size in (1, 2, 3, 8, 1000):
        written = [[0] * count for count, _ in values]
        for rank in range(size):
            ranges = split_evenly(values, rank, size)
            num_bytes = sum((stop - start) * each for (start, stop), (_, each) in zip(ranges, values, strict=True))
            assert abs(num_bytes - total / size) <= 14
            for (start, stop), of in zip(ranges, written, strict=True):
                of[start:stop] = [n + 1 for n in of[start:stop]]
        assert written == [[1] * count for count, _ in values]
