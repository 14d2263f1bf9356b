"""Without SGLang: expected tensors, the weight loader with votes of two TP ranks in threads, and control calls."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang.weight_update import messages, weight_loader
from megarl.engines.sglang.weight_update.control_calls import ControlCalls
from megarl.engines.sglang.weight_update.planned_boxes import find_bucket_problems, read_expected_tensors
from megarl.engines.sglang.weight_update.weight_loader import all_ready
from megarl.errors import DataError, WeightSyncError
from megarl.reshard.layout.layout import full_local
from megarl.reshard.transfer.box_channel import BoxSender
from megarl.reshard.transfer.bucket import Bucket, SharedBuffer, lay_out, slot_view
from tests.engines.remote import box_bucket
from tests.errors import expect_error
from tests.rollout.clock import in_virtual_time, iterate
from tests.time_limits import UNREACHED_SECONDS


def model_folder(folder, shards, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return str(folder)


@pytest.fixture
def expected(tmp_path):
    shards = [{"a": torch.zeros(2, 3)}, {"b": torch.zeros(4, dtype=torch.bfloat16)}]
    return read_expected_tensors(model_folder(tmp_path / "m", shards))


def bucket_problems(expected, tensors, dtype="float32", missing_bytes=0):
    slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors)
    return find_bucket_problems(Bucket("", num_bytes - missing_bytes, slots), expected, dtype)


def test_all_files_are_read(expected):
    assert {name: (e.shape, e.dtype, e.required) for name, e in expected.items()} == {
        "a": ((2, 3), "float32", True),
        "b": ((4,), "bfloat16", True),
    }


def test_tensor_may_have_the_dtype_of_the_engine_or_the_folder(expected):
    assert bucket_problems(expected, [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]) == []
    assert bucket_problems(expected, [("b", torch.zeros(4, dtype=torch.bfloat16))]) == []


def test_weights_in_fp8_have_to_be_sent_so(tmp_path):
    values = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    expected = read_expected_tensors(model_folder(tmp_path / "q", [{"a": values, "a_scale_inv": torch.ones(1, 1)}]))
    assert bucket_problems(expected, [("a", values), ("a_scale_inv", torch.ones(1, 1))], dtype="bfloat16") == []
    (problem,) = bucket_problems(expected, [("a", torch.zeros(2, 3).bfloat16())], dtype="bfloat16")
    assert problem == "a needs dtype float8_e4m3fn, got bfloat16"


def test_every_problem_is_reported(expected):
    tensors = [("c", torch.zeros(1)), ("a", torch.zeros(3, 2)), ("b", torch.zeros(4).double())]
    assert bucket_problems(expected, tensors) == [
        "c is no tensor of the model",
        "a needs shape [2, 3], got [3, 2]",
        "b needs dtype float32 or bfloat16, got float64",
    ]


def test_tensor_must_be_unique_and_inside_the_bucket(expected):
    assert bucket_problems(expected, [("a", torch.zeros(2, 3))] * 2) == ["a is contained twice"]
    (problem,) = bucket_problems(expected, [("b", torch.zeros(4))], missing_bytes=56)
    assert problem == "b ends at byte 0 + 16 = 16, the bucket at 8"


def test_tied_head_is_not_required(tmp_path):
    shards = [{"model.embed_tokens.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}]
    for is_tied in (True, False):
        folder = model_folder(tmp_path / str(is_tied), shards, tie_word_embeddings=is_tied)
        assert read_expected_tensors(folder)["lm_head.weight"].required == (not is_tied)


def test_duplicates_in_mtp_layers_are_not_required(tmp_path):
    names = ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]
    kept = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.4.shared_head.norm.weight"]
    folder = model_folder(tmp_path / "m", [{name: torch.zeros(2, 2) for name in names + kept}])
    assert {name for name, entry in read_expected_tensors(folder).items() if entry.required} == set(kept)


def test_folder_without_weights_raises(tmp_path):
    with expect_error(DataError, "safetensors", "holds"):
        read_expected_tensors(str(tmp_path))


def test_invalid_file_is_reported(tmp_path):
    folder = model_folder(tmp_path / "m", [])
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    message = r"model\.safetensors is not readable as safetensors: its header is not valid JSON"
    with pytest.raises(DataError, match=message):
        read_expected_tensors(folder)


class Engine(nn.Module):
    """Loads by name, as SGLang's models do."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4))
        self.b = nn.Parameter(torch.zeros(4))
        self.fails = False

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            if self.fails:
                raise RuntimeError("out of memory")


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(weight_loader, "tp_rank", lambda: 1)
    monkeypatch.setattr(weight_loader, "tp_group", lambda: None)
    return Engine()


@pytest.fixture
def command(tmp_path):
    """Makes commands to write `a` and `b` from a bucket."""
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    buffers = []

    def make(**tensors):
        slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
        buffers.append(SharedBuffer(num_bytes))
        for slot in slots:
            slot_view(buffers[-1].bytes, slot).copy_(tensors[slot.name])
        bucket = Bucket(buffers[-1].path, buffers[-1].num_bytes, tuple(slots))
        added = {"reply": str(tmp_path / "reply"), "model_path": str(tmp_path), "dtype": "float32"}
        return {"op": "write", "bucket": asdict(bucket)} | added

    yield make
    for buffer in buffers:
        buffer.close()


def execute(model, command):
    weight_loader.load(model, [(json.loads(json.dumps(command)), torch.empty(0))])
    return messages.read_reply(messages.reply_path(command["reply"], 1))


def test_valid_bucket_is_written(model, command):
    reply = execute(model, command(a=torch.ones(4), b=torch.full((4,), 2.0)))
    assert (reply.rank, reply.error, reply.wrote) == (1, None, True)
    assert model.a.tolist() == [1.0] * 4
    assert model.b.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("tensors", "change", "error"),
    [
        ({"c": torch.ones(4), "b": torch.ones(5)}, {}, "c is no tensor of the model; b needs shape [4], got [5]"),
        ({}, {"path": "/gone"}, "FileNotFoundError"),
        ({}, {"num_bytes": 40_960_000}, "needs 40960000 bytes, got 4096"),
    ],
    ids=["tensors", "path", "size"],
)
def test_invalid_bucket_is_rejected_completely(model, command, tensors, change, error):
    invalid = command(a=torch.ones(4), **tensors)
    invalid["bucket"] |= change
    reply = execute(model, invalid)
    assert not reply.wrote
    assert error in reply.error
    assert model.a.tolist() == [0.0] * 4


def test_failure_during_the_write_is_reported(model, command):
    model.fails = True
    reply = execute(model, command(a=torch.ones(4)))
    assert (reply.wrote, reply.error) == (True, "RuntimeError: out of memory")


@pytest.mark.parametrize("delta", [None, {"number": 2, "base": None}])
def test_failure_to_complete_the_model_is_reported_when_the_sender_is_free(model, command, delta):
    """`a` comes in full, as if another rank computed values from it; it fails to load, and the next sync repairs it."""
    boxes = [(full_local("a"), ((0, 4),), torch.ones(4)), ("b", ((0, 4),), torch.full((4,), 2.0))]
    (buffer, bucket), common = box_bucket(boxes), command()
    sender = BoxSender("trainer rank 1", "engine 0 rank 1", [bucket.slots], UNREACHED_SECONDS)
    assert execute(model, common | {"op": "prepare", "offers": [None, asdict(sender.offer)]}).error is None
    receive = common | {"op": "receive", "delta": delta, "abort_file": "/none", "seconds": UNREACHED_SECONDS}
    for fails in (True, False):
        model.fails = fails
        sender.begin()
        copied = sender.load_boxes(0, bucket)
        reply = execute(model, receive)
        copied()
        assert (reply.wrote, reply.error) == (True, "RuntimeError: out of memory" if fails else None)
        assert sender.failure == ""
    assert model.a.tolist() == [1.0] * 4
    assert model.b.tolist() == [2.0] * 4
    sender.close()
    buffer.close()


def test_unknown_operation_replies_with_an_error(model, command):
    assert execute(model, command(a=torch.ones(4)) | {"op": "nonsense"}).error == "KeyError: 'nonsense'"


def test_missing_reply_if_it_cannot_be_written(model, command, tmp_path):
    assert execute(model, command(a=torch.ones(4)) | {"reply": str(tmp_path / "missing" / "reply")}) is None


def test_dump_saves_parameters_by_name(model, tmp_path):
    execute(model, {"op": "dump", "directory": str(tmp_path), "reply": str(tmp_path / "reply")})
    assert torch.load(tmp_path / "rank1.pt").keys() == {"a", "b"}
    assert torch.load(tmp_path / "rank1.buffers.pt").keys() == set()


@pytest.fixture
def both():
    """Runs a function of (rank, group) in two ranks, which are threads, and returns their results."""
    store = dist.HashStore()

    def run(rank, work):
        return work(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=UNREACHED_SECONDS)))

    def run_both(work):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, (0, 1), (work, work)))

    return run_both


@pytest.mark.parametrize("votes", [(True, True), (True, False), (False, True), (False, False)])
def test_vote_succeeds_only_if_all_ranks_are_ready(both, tmp_path, votes):
    assert both(lambda rank, group: all_ready(votes[rank], group, tmp_path / str(rank))) == [all(votes)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("ready", [True, False])
def test_single_rank_does_not_wait(tmp_path, ready):
    assert all_ready(ready, None, tmp_path / "mark") is ready
    assert not any(tmp_path.iterdir())


def test_rank_votes_even_if_it_cannot_create_the_checked_file(both, tmp_path):
    assert both(lambda rank, group: all_ready(True, group, tmp_path / "missing" / str(rank))) == [True, True]


@pytest.fixture
def execute_in_both(both, monkeypatch):
    """Executes one command per rank on separate models; returns both models and replies."""
    here = threading.local()
    monkeypatch.setattr(weight_loader, "tp_rank", lambda: here.rank)
    monkeypatch.setattr(weight_loader, "tp_group", lambda: here.group)

    def run(commands):
        models = [Engine(), Engine()]

        def load(rank, group):
            here.rank, here.group = rank, group
            weight_loader.load(models[rank], [(commands[rank], torch.empty(0))])
            return messages.read_reply(messages.reply_path(commands[rank]["reply"], rank))

        return models, both(load)

    return run


@pytest.mark.parametrize("change", [{"path": "/gone"}, {"num_bytes": 10**7}, {"slots": None}], ids=str)
def test_no_rank_writes_if_one_cannot(execute_in_both, command, change):
    """Also if that rank fails before it votes."""
    good = command(a=torch.ones(4))
    bad = {name: value for name, value in (good["bucket"] | change).items() if value is not None}
    models, replies = execute_in_both([good, good | {"bucket": bad}])
    assert [reply.wrote for reply in replies] == [False, False]
    assert replies[0].error is None
    assert replies[1].error
    assert all((model.a == 0).all() for model in models)


def test_all_ranks_write_if_all_are_ready(execute_in_both, command):
    good = command(a=torch.ones(4))
    models, replies = execute_in_both([good, good])
    assert [(reply.wrote, reply.error) for reply in replies] == [(True, None)] * 2
    assert all((model.a == 1).all() for model in models)
    assert messages.checked_path(good["reply"], 0).exists()


def test_commands_that_write_nothing_have_no_vote(execute_in_both, tmp_path):
    dump = {"op": "dump", "directory": str(tmp_path), "reply": str(tmp_path / "reply")}
    _, replies = execute_in_both([dump, dump])
    assert [(reply.wrote, reply.error) for reply in replies] == [(False, None)] * 2
    assert not messages.checked_path(dump["reply"], 0).exists()


SECONDS = 10


class Host:
    spec = EngineSpec(model_path="", answer_timeout_seconds=SECONDS)

    async def call(self, work):
        return await work


class Calls(ControlCalls):
    """Fake SGLang that answers as soon as `answers` is set."""

    def __init__(self):
        super().__init__(Host(), None)
        self.answers, self.sent = asyncio.Event(), []

    async def _wait_for_answer(self, what):
        self.sent.append(what)
        await self.answers.wait()
        return True, ""

    async def _pause(self):
        await self._wait_for_answer("pause")

    async def _flush(self):
        await self._wait_for_answer("flush")
        raise WeightSyncError("requests were still running")

    async def _begin(self, selector):
        await self._wait_for_answer("begin")
        self._begun = True

    async def _end(self):
        if self._begun:
            await self._wait_for_answer("end")
            self._begun = False


@in_virtual_time
async def test_late_answer_is_waited_for_and_used():
    calls = Calls()
    with expect_error(WeightSyncError, "begin_weight_update", "10"):
        await calls.begin()
    assert calls.has_pending
    with expect_error(WeightSyncError, "begin_weight_update"):
        await calls.pause()
    assert calls.sent == ["begin"]
    calls.answers.set()
    await calls.begin()
    assert calls.sent == ["begin", "end", "begin"]
    assert not calls.has_pending


@in_virtual_time
async def test_late_failure_belongs_to_the_call_that_timed_out():
    calls = Calls()
    with expect_error(WeightSyncError, "flush_cache"):
        await calls.flush()
    calls.answers.set()
    await calls.pause()
    with expect_error(WeightSyncError, "running", "still"):
        await calls.flush()


@in_virtual_time
async def test_call_of_a_cancelled_caller_is_waited_for():
    calls = Calls()
    gone = asyncio.create_task(calls.begin())
    await iterate(2)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert calls.has_pending
    asyncio.get_running_loop().call_later(SECONDS / 2, calls.answers.set)
    await calls.end()
    assert calls.sent == ["begin", "end"]
