"""From a name in the configuration to the strategy."""

from __future__ import annotations

from megarl.config.weight_sync import WeightSyncConfig
from megarl.reshard.planning.strategy import Strategy, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.strategies.gather_hf import GatherHf


def make_strategy(config: WeightSyncConfig, context: SyncContext) -> Strategy:
    """The strategy that `weight_sync.strategy` names."""
    match config.strategy:
        case "gather_hf":
            return GatherHf(context, config.bucket_bytes)
        case "micro_dp" | "exact":
            return BoxStrategy(context, config.bucket_bytes, config.timeout_seconds)
        case "auto":
            raise AssertionError("auto is resolved where the sizes of both sides are known")
