"""Weight resharding: moves weights from the trainer's parallel layout to the engines' layout.

Plans are pure functions of what each rank holds and needs, without processes.
"""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.reshard.analysis.forecast import Forecast, forecast
    from megarl.reshard.analysis.nccl_progress import PostedGroup, Stall, find_stalls, posted_groups
    from megarl.reshard.analysis.scenario import Scenario
    from megarl.reshard.analysis.sync_report import explain
    from megarl.reshard.layout.box_index import SyncIndex
    from megarl.reshard.layout.engine_ranks import place_engines_by_overlap, place_engines_strided, resolve_strategy
    from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
    from megarl.reshard.layout.lower_bounds import node_bounds, rank_bounds
    from megarl.reshard.layout.topology import Topology
    from megarl.reshard.planning.plan import RankPlan, plan_rank
    from megarl.reshard.planning.rounds import Round, build_rounds

__all__ = [
    "Forecast",
    "PostedGroup",
    "RankPlan",
    "Round",
    "Scenario",
    "ShardPiece",
    "Stall",
    "SyncIndex",
    "TensorSpec",
    "Topology",
    "WeightLayout",
    "build_rounds",
    "explain",
    "find_stalls",
    "forecast",
    "node_bounds",
    "place_engines_by_overlap",
    "place_engines_strided",
    "plan_rank",
    "posted_groups",
    "rank_bounds",
    "resolve_strategy",
]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.reshard.analysis.forecast": ("Forecast", "forecast"),
        "megarl.reshard.analysis.nccl_progress": ("PostedGroup", "Stall", "find_stalls", "posted_groups"),
        "megarl.reshard.analysis.scenario": ("Scenario",),
        "megarl.reshard.analysis.sync_report": ("explain",),
        "megarl.reshard.layout.box_index": ("SyncIndex",),
        "megarl.reshard.layout.engine_ranks": ("place_engines_by_overlap", "place_engines_strided", "resolve_strategy"),
        "megarl.reshard.layout.layout": ("ShardPiece", "TensorSpec", "WeightLayout"),
        "megarl.reshard.layout.topology": ("Topology",),
        "megarl.reshard.layout.lower_bounds": ("node_bounds", "rank_bounds"),
        "megarl.reshard.planning.plan": ("RankPlan", "plan_rank"),
        "megarl.reshard.planning.rounds": ("Round", "build_rounds"),
    },
)
