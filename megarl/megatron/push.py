"""Handing this trainer's weights to sinks through a strategy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.config.weight_sync import WeightSyncConfig
from megarl.megatron import platform
from megarl.megatron.trainer import MegatronTrainer
from megarl.megatron.work import PushOrder
from megarl.reshard.layout import WeightLayout
from megarl.reshard.strategy import Strategy, SyncStats, make_strategy


def make(config: WeightSyncConfig, trainer: MegatronTrainer, *, senders: list[int]) -> Strategy:
    """The configured strategy, every rank knowing every rank's layout."""
    layouts: list[WeightLayout] = [trainer.layout] * dist.get_world_size()
    dist.all_gather_object(layouts, trainer.layout)
    return make_strategy(config, rank=dist.get_rank(), layouts=layouts, senders=senders)


def run(strategy: Strategy, trainer: MegatronTrainer, order: PushOrder) -> SyncStats:
    """Push, and add up what the ranks counted."""
    with torch.no_grad():
        mine = strategy.push(trainer.tensors(), order.sinks.get(dist.get_rank(), ()))
    counts = torch.tensor([mine.bytes_sent, mine.bytes_received, mine.bytes_delivered], device=platform.device())
    dist.all_reduce(counts)
    sent, received, delivered = (int(n) for n in counts.tolist())
    assert sent == received, f"ranks sent {sent} bytes and received {received}"
    return SyncStats(bytes_sent=sent, bytes_received=received, bytes_delivered=delivered, buckets=mine.buckets)
