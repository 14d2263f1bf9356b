"""Creation of the strategy that the configuration names."""

from __future__ import annotations

from megarl.config.weight_sync import WeightSyncConfig
from megarl.reshard.planning.strategy import Strategy, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.heartbeat import HeartbeatSpec


def make_strategy(config: WeightSyncConfig, context: SyncContext, heartbeat: HeartbeatSpec | None = None) -> Strategy:
    """Create the strategy that `weight_sync.strategy` names; collective over all trainer ranks.

    Args:
        heartbeat: where the ranks leave their heartbeats during a sync; not used by `gather_hf`.
    """
    match config.strategy:
        case "gather_hf":
            return GatherHf(context, config.bucket_bytes, timeout_seconds=config.timeout_seconds)
        case "micro_dp" | "exact":
            return BoxStrategy(context, config.bucket_bytes, config.timeout_seconds, heartbeat=heartbeat)
        case "auto":
            raise AssertionError("auto has to be resolved before, where the sizes of both sides are known")
