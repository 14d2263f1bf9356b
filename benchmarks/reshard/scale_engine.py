"""What a colocated engine spends on weight sync at scale: its host, and one of its TP ranks.

The host runs the product's code with calls to SGLang that serialize what they would send, and write the replies of the
TP ranks. A TP rank checks and copies boxes of parameters on torch's meta device: views and copies cost their time in
Python and in torch's dispatch, but move no bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megarl.engines.sglang.request_runner import RequestRunner
from megarl.engines.sglang.weight_update.control_calls import ControlCalls
from megarl.engines.sglang.weight_update.messages import Command, RankFiles, Reply, send_reply
from megarl.engines.sglang.weight_update.planned_boxes import PlannedBoxes
from megarl.engines.sglang.weight_update.update_session import WeightSession
from megarl.errors import WeightSyncError
from megarl.reshard.transfer.box_channel import BoxReceiver, BoxSender
from megarl.reshard.transfer.bucket import BoxSlot

T = TypeVar("T")

ENGINE_SECONDS = 60.0


@dataclass(kw_only=True)
class EngineRankCost:
    """What a TP rank of a colocated engine spends, in CPU seconds."""

    connect_cpu_seconds: float
    """Reading which boxes come in which round, and checking them against the model."""
    sync_cpu_seconds: float
    """Views and copies of the boxes of all rounds."""


def host_cpu_seconds(tp: int) -> float:
    """Return the CPU seconds of an engine's host for receiving one update, the better of two."""
    with tempfile.TemporaryDirectory() as folder:
        spec = SimpleNamespace(
            tp=tp,
            model_path=folder,
            dtype="bfloat16",
            policy_version=0,
            pause_mode="retract",
            answer_timeout_seconds=ENGINE_SECONDS,
            round_timeout_seconds=ENGINE_SECONDS,
        )
        host: Any = _Host(spec, folder)
        return min(asyncio.run(_receive(host)) for _ in range(2))


async def _receive(host: Any) -> float:
    requests = RequestRunner(host, ())
    session = WeightSession(host, requests)
    session._is_open, session.calls = True, _Calls(host, requests)
    began = time.process_time()
    await session.receive()
    return time.process_time() - began


class _Host:
    """The host's folder of files that it exchanges with TP ranks, all of which are on its node."""

    failure = None

    def __init__(self, spec: SimpleNamespace, folder: str) -> None:
        self.spec, self.directory = spec, folder
        self._files = RankFiles(folder, range(spec.tp))

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def folders(self) -> list[str]:
        return [self.directory] * len(self._files.ranks)

    async def take_replies(self, number: int) -> list[Reply | None]:
        return self._files.take_replies(number)


class _Calls(ControlCalls):
    """Calls to SGLang that reach nobody, and that every TP rank answers."""

    async def _send(self, commands: Sequence[Command]) -> None:
        for rank, command in enumerate(commands):
            pickle.dumps([(dict(command), torch.empty(0))])
            send_reply(Reply(rank, wrote=True), command)


@contextmanager
def signaled_sender(rank: int, rounds: Sequence[Sequence[BoxSlot]]) -> Iterator[BoxSender]:
    """Yield a sender whose receiver answers every signal, in another thread of this process."""
    sender = BoxSender(f"trainer rank {rank}", "engine rank", rounds, ENGINE_SECONDS)
    receiver = BoxReceiver(sender.offer)
    threading.Thread(target=_answer, args=(receiver, rounds), daemon=True).start()
    sender.begin()
    yield sender
    sender.close()


def _answer(receiver: BoxReceiver, rounds: Sequence[Sequence[BoxSlot]]) -> None:
    try:
        while True:
            for index in (i for i, slots in enumerate(rounds) if slots):
                receiver.receive(index, ENGINE_SECONDS, lambda: None)
                receiver.acknowledge()
    except WeightSyncError:  # the sender has closed
        receiver.close()


def engine_rank_cost(sender: BoxSender, parameters: Mapping[str, Tensor], bucket_bytes: int) -> EngineRankCost:
    """Return the cost of the TP rank that receives from `sender`; the sync is the better of two.

    Args:
        parameters: tensors on the meta device, by name.
        bucket_bytes: size of a bucket.
    """
    model = _Model(parameters)
    began = time.process_time()
    rounds = sender.offer.read_slots()
    boxes = PlannedBoxes(model, rounds)
    connect_seconds = time.process_time() - began
    bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device="meta")
    seconds = []
    for _ in range(2):
        began = time.process_time()
        boxes.refresh(model)
        for index, slots in enumerate(rounds):
            if slots:
                boxes.write_round(index, bucket)
        seconds.append(time.process_time() - began)
    return EngineRankCost(connect_cpu_seconds=connect_seconds, sync_cpu_seconds=min(seconds))


class _Model(nn.Module):
    """A model with these buffers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())
