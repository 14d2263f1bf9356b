"""megarl: reinforcement learning for language models on Megatron-core and SGLang.

What code outside the package is written with:

    from megarl import Trajectory, rl  # rl: algorithms, their losses and estimators
    from megarl import agents, engines, environments, rewards, models, functional

Names are imported when they are first used.
"""

import time

TYPE_CHECKING = False  # without the import of typing, because sandboxes import megarl for each program
if TYPE_CHECKING:
    from megarl import algorithms as rl
    from megarl import engines as engines
    from megarl import functional as functional
    from megarl import reward as rewards
    from megarl.batch.trajectory import Trajectory as Trajectory
    from megarl.megatron import families as models
    from megarl.rollout import agents as agents
    from megarl.rollout import environments as environments
    from megarl.rollout.agents.episode import Episode as Episode

__version__ = "0.1.0"

IMPORT_STARTED_AT = time.time()
"""Unix time at which this process began to import megarl; startup is measured from it."""

__all__ = ["Episode", "Trajectory", "agents", "engines", "environments", "functional", "models", "rewards", "rl"]


def __getattr__(name: str) -> object:
    from megarl.lazy_names import lazy_names

    get = lazy_names(
        __name__,
        {"megarl.batch.trajectory": ("Trajectory",), "megarl.rollout.agents.episode": ("Episode",)},
        agents="megarl.rollout.agents",
        engines="megarl.engines",
        environments="megarl.rollout.environments",
        functional="megarl.functional",
        models="megarl.megatron.families",
        rewards="megarl.reward",
        rl="megarl.algorithms",
    )
    return get(name)
