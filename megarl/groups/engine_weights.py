"""The weights on the engines: those of the policy, or of another language model that the run trains.

Engines serve one model at a time. Each model has a `WeightSync` of its own. A push of another model than the last one
connects the engines with its ranks again and sends all weights.
"""

from __future__ import annotations

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.groups.auxiliary_models import AuxiliaryModels
from megarl.groups.engine_group import EngineGroup
from megarl.groups.sync_update import PushReport
from megarl.groups.trainer_group import TrainerGroup
from megarl.groups.weight_sync import WeightSync
from megarl.placement.pool import SlotPool


class EngineWeights:
    """Pushes the weights of the policy, or of the trained model that is selected, to the engines."""

    def __init__(
        self, config: RunConfig, trainer: TrainerGroup, models: AuxiliaryModels, engines: EngineGroup, pool: SlotPool
    ) -> None:
        """Connect the ranks of the policy with the engines; `pool`: slots of the policy."""
        self._config, self._models, self._engines, self._pool = config, models, engines, pool
        self._syncs: dict[str | None, WeightSync] = {None: WeightSync(config, trainer, engines, pool)}
        self._selected: str | None = None

    @property
    def policy_version(self) -> int:
        """Version of the last push; -1 before the first one."""
        return self._syncs[self._selected].policy_version

    def select(self, model: str | None) -> bool:
        """Choose whose weights pushes send, None: the policy's; return whether the engines hold those of another model.

        Raises:
            ConfigError: engines cannot serve the model.
        """
        if model == self._selected:
            return False
        if model is not None:
            self._require_servable(model)
        before, self._selected = self._syncs[self._selected], model
        before.release_engines()
        if model not in self._syncs:
            assert model is not None
            self._syncs[model] = WeightSync(self._config, self._models.trained[model], self._engines, self._pool)
        self._syncs[model].policy_version = before.policy_version
        return True

    def push(self, policy_version: int) -> PushReport:
        """Push the weights of the selected model as `policy_version`; raises as `WeightSync.push`."""
        return self._syncs[self._selected].push(policy_version)

    def mark_outdated(self, model: str | None) -> None:
        """Note that a model, None: the policy, has newer weights than were pushed; no-op for one that was never."""
        if model in self._syncs:
            self._syncs[model].is_outdated = True

    def _require_servable(self, model: str) -> None:
        kind, names = self._config.algorithm.type, sorted(self._models.trained)
        if model not in self._models.trained:
            raise ConfigError(
                f"algorithm.type: {kind} lets engines serve the model {model!r}, which is none of the models that it "
                f"trains: {', '.join(names) or 'none'}"
            )
        if model in self._models.dedicated:
            raise ConfigError(
                f"placement.{model}: {kind} lets engines serve this model, which needs the slots of the policy then, "
                "got a pool of its own"
            )
        head = next(each.head for each in self._config.auxiliary_models if each.name == model)
        if head != "lm":
            raise ConfigError(
                f"algorithm.type: {kind} lets engines serve the model {model!r}, which needs to be a language model, "
                f"got one with the head {head!r}"
            )
