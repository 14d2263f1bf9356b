"""The configuration of each training stage, composed of its sections: SFT, RL, reward models and DPO.

`checkpoint` and `tracking`, which say what a run writes, are here too, and so is what finds and replaces the paths in a
configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, override

from pydantic import Field, model_validator

from megarl.config.algorithm import AlgorithmConfig, GrpoConfig
from megarl.config.data import DataConfig, EvalConfig, SourceConfig
from megarl.config.limits import LimitsConfig
from megarl.config.model import AuxiliaryModel, ModelConfig, auxiliary_models_of
from megarl.config.placement import MAIN_POOL, PlacementConfig, PoolConfig, pool_key, require_layout
from megarl.config.policy import CriticConfig, FrozenModelConfig, RolloutIsConfig
from megarl.config.reward import ModelRewardConfig, RewardsConfig
from megarl.config.rollout import EnvironmentConfig, RolloutConfig, ScheduleConfig, WeightSyncConfig
from megarl.config.section import FilePath, Section, Seed
from megarl.config.trainer import SupervisedTrainerConfig, TrainerConfig


class RecoveryConfig(Section):
    """How a run reacts when one of its processes dies or hangs, and how it shuts down."""

    max_restarts: int = Field(default=20, ge=0)
    """Number of restarts within a day for each process of a kind: with 100 engines, 100 times as many restarts of
    engines. The ranks of the trainer restart together and count as one process. The next failure within the day ends
    the run. 0: no restarts."""

    max_identical_failures: int = Field(default=3, ge=1)
    """Abort after this many identical failures of a process with no completed step in between. An engine is left out
    instead while others serve."""

    engine_stall_seconds: float = Field(default=60.0, gt=0)
    """Seconds without an answer to a ping after which an engine or a rollout worker counts as dead. Each is pinged
    every quarter of this time, while the run waits for completions."""

    node_wait_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a trainer which has lost a node waits for another node to join the cluster."""

    phase_timeout_seconds: float | None = Field(default=3600.0, gt=0)
    """Timeout in seconds of one phase of a step, which fails with a stack dump of every worker. null: no timeout."""

    grace_seconds: float = Field(default=15.0, gt=0)
    """Seconds after SIGTERM that the current step and its checkpoint may take; then the run ends without them. Slurm
    kills after 30 s by default (KillWait), and `megarl launch` after 20 s."""


class CheckpointConfig(Section):
    """Checkpoints that a run can resume from, in `<run_dir>/checkpoints`."""

    every: int = Field(default=20, ge=0)
    """Number of steps between checkpoints. One is also written after the last step, and when the run is stopped early.
    0: none; an interrupted run, or one that loses its trainer, starts over from step 0. Its journal then has only
    the groups of the step in progress, and of later ones, unless `keep_journal` is `all`."""

    keep_last: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep. With 2, a run can resume even if the latest is damaged."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept forever. 0: none."""

    asynchronous: bool = True
    """Write files in the background from a copy in host memory, while training continues."""

    max_staging_bytes: int | None = Field(default=None, ge=0)
    """Limit in bytes of that copy per rank. What exceeds it is written before training continues. Default: no limit."""

    hf: bool = False
    """Also write the model in Hugging Face format, to the checkpoint's folder `hf`. Training waits for this."""

    keep_journal: Literal["needed", "all"] = "needed"
    """Which groups stay in `<run_dir>/journal`. `needed`: those that a run reads that resumes from one of the last
    `keep_last` checkpoints. `all`: of every step, 8 bytes a token, so that `megarl replay` can repeat the whole run."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the manifest before a checkpoint is loaded: checksums of all files, or only their sizes."""


class WandbConfig(Section):
    """Logging to Weights & Biases; needs the package `wandb`."""

    project: str
    """Name of the project."""

    name: str | None = None
    """Name of the run in the project. Default: chosen by Weights & Biases."""


class SinkConfig(Section):
    """An output for metrics outside the package."""

    path: str
    """Import path of a class, `package.module:Class`, of which the controller creates one object, as
    `Class(run_dir, step, **kwargs)`: `step` is the step that the run resumes from, or null. The object has the methods
    `log(metrics, *, step)` and `close()`. An exception of `log` is reported, and the metrics of the step are lost in
    this output only."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the class."""


class TrackingConfig(Section):
    """Logs that a run writes."""

    tensorboard: bool = True
    """Write metrics for TensorBoard to the folder `tensorboard`."""

    jsonl: bool = True
    """Write metrics to metrics.jsonl, one object per step."""

    rollouts: bool = True
    """Write every prompt, response, reward, advantage and policy version to rollouts/*.parquet."""

    wandb: WandbConfig | None = None
    """Logging to Weights & Biases. null: none."""

    sinks: tuple[SinkConfig, ...] = ()
    """Further outputs for the metrics of each step."""


class StageConfig(Section):
    """Sections of every training stage."""

    run_dir: FilePath
    """Folder for everything that the run writes."""

    seed: Seed = 0
    """Seed of data order, sampling and initialization."""

    model: ModelConfig
    data: DataConfig
    trainer: TrainerConfig = TrainerConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    export_dir: FilePath | None = None
    """Folder for the trained model in Hugging Face format. Default: `<run_dir>/model`."""

    @model_validator(mode="after")
    def _check_layouts(self) -> StageConfig:
        present = {auxiliary.role for auxiliary in self.auxiliary_models}
        for role, placed in self.placement.auxiliary_roles.items():
            if placed.pool != MAIN_POOL and role.removeprefix("models.") not in present:
                raise ValueError(f"placement.{role}.pool is {placed.pool!r}, but the run has no such model")
        if self.placement.rollout.pool != MAIN_POOL and not isinstance(self, RunConfig):
            raise ValueError(f"placement.rollout.pool is {self.placement.rollout.pool!r}, but the stage has no engines")
        require_layout(self.trainer.parallel, self.placement, key="trainer.parallel", where="placement")
        for auxiliary in self.auxiliary_models:
            own = auxiliary.parallel_key.startswith(auxiliary.key)
            require_layout(
                auxiliary.parallel,
                self.placement.all_pools[auxiliary.pool],
                key=auxiliary.parallel_key if own else f"trainer.parallel, for {auxiliary.key},",
                where=pool_key(auxiliary.pool),
            )
        return self

    @property
    def auxiliary_models(self) -> tuple[AuxiliaryModel, ...]:
        """The auxiliary models of the stage."""
        return ()

    @property
    def policy_updates(self) -> int:
        """Number of optimizer steps of the trained model in the whole run."""
        return self.trainer.steps

    @property
    def dp(self) -> int:
        """Data-parallel size of the trainer: slots / (tp * pp * cp)."""
        return self.placement.slots // self.trainer.parallel.model_size

    @property
    def export_path(self) -> str:
        """Folder that the trained model is written to."""
        return self.export_dir or f"{self.run_dir}/model"


class SupervisedStageConfig(StageConfig):
    """Sections of the stages without engines, which take batches from a file."""

    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()

    @model_validator(mode="after")
    def _check_single_file(self) -> SupervisedStageConfig:
        if self.data.sources:
            raise ValueError("data.sources: only train mixes sources; other stages need data.path")
        if self.data.difficulty is not None:
            raise ValueError("data.difficulty: only train samples completions, whose pass rate it bounds")
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> SupervisedStageConfig:
        if self.trainer.offload.is_enabled:
            raise ValueError("trainer.offload: only train has engines that need the memory")
        return self


class SftConfig(SupervisedStageConfig):
    """`megarl sft`: supervised fine-tuning on demonstrations."""


class RunConfig(StageConfig):
    """`megarl train`: reinforcement learning."""

    algorithm: AlgorithmConfig = GrpoConfig()
    """The algorithm: its batches, loss, KL penalties and auxiliary models."""

    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    """When groups are sampled and trained on."""

    reward: RewardsConfig = RewardsConfig()
    eval: EvalConfig = EvalConfig()
    """How held-out rows are evaluated."""

    weight_sync: WeightSyncConfig = WeightSyncConfig()
    limits: LimitsConfig = LimitsConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @model_validator(mode="before")
    @classmethod
    def _check_batch_size(cls, data: object) -> object:
        trainer = data.get("trainer") if isinstance(data, dict) else None
        if isinstance(trainer, dict) and "batch_size" in trainer:
            raise ValueError(
                "trainer.batch_size is a key of sft, rm and dpo; train samples algorithm.prompts_per_step * "
                "algorithm.group_size completions in a step"
            )
        return data

    @property
    def auxiliary_models(self) -> tuple[AuxiliaryModel, ...]:
        """The auxiliary models of the run."""
        return tuple(auxiliary_models_of(self.algorithm, self.reward, self.model, self.trainer, self.placement))

    @model_validator(mode="after")
    def _correct_old_samples(self) -> RunConfig:
        """Set `algorithm.rollout_is` where steps train on samples of older weights, unless the file says otherwise."""
        algorithm = self.algorithm
        if self.schedule.type != "sync" and not algorithm.model_fields_set & {"rollout_is", "decoupled"}:
            self.__dict__["algorithm"] = algorithm.model_copy(update={"rollout_is": RolloutIsConfig()})  # frozen
        return self

    @model_validator(mode="after")
    def _compare_no_custom_engine(self) -> RunConfig:
        """Turn the comparison of weights off by default for custom engines."""
        if self.rollout.engine.is_custom and "verify" not in self.weight_sync.model_fields_set:
            self.__dict__["weight_sync"] = self.weight_sync.model_copy(update={"verify": None})  # frozen
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> RunConfig:
        tp, replicas, pool = self.rollout.tp, self.rollout.replicas, self.rollout_pool
        key = pool_key(self.placement.rollout.pool)
        if tp * replicas > pool.slots:
            raise ValueError(
                f"rollout needs tp * replicas <= slots, got {tp} * {replicas} = {tp * replicas} > {pool.slots} "
                f"({key}.nodes * {key}.slots_per_node)"
            )
        if tp > pool.slots_per_node and not self.disaggregated:
            raise ValueError(
                f"rollout.tp needs to fit on one node, got rollout.tp = {tp} > {key}.slots_per_node = "
                f"{pool.slots_per_node}; only engines with a pool of their own (placement.rollout.pool) may span nodes"
            )
        if tp > pool.slots_per_node and tp % pool.slots_per_node:
            raise ValueError(
                f"rollout.tp needs to fit on one node or to fill several, got rollout.tp % {key}.slots_per_node = "
                f"{tp} % {pool.slots_per_node} = {tp % pool.slots_per_node}"
            )
        return self

    @model_validator(mode="after")
    def _check_custom_engine(self) -> RunConfig:
        if not self.rollout.engine.is_custom:
            return self
        kind, sync, update = self.rollout.engine.type, self.weight_sync, self.schedule.resolved().update
        needs = None
        if sync.strategy != "gather_hf":
            needs = f"weight_sync.strategy: needs gather_hf, got {sync.strategy}", "receives full tensors"
        elif sync.verify is not None:
            needs = "weight_sync.verify: needs to be null", "has no boxes that could be compared"
        elif self.nodes_per_engine > 1:
            needs = f"rollout.tp: needs to fit on one node, got {self.rollout.tp}", "is one process"
        elif update not in (None, "drain"):
            needs = f"schedule.update: needs drain, got {update}", "finishes its requests before it gets weights"
        if needs:
            raise ValueError(f"{needs[0]}, because the engine {kind} {needs[1]}")
        return self

    @model_validator(mode="after")
    def _check_disaggregated(self) -> RunConfig:
        if not self.disaggregated:
            return self
        name, strategy = self.placement.rollout.pool, self.weight_sync.strategy
        if strategy not in ("auto", "exact"):
            raise ValueError(
                "weight_sync.strategy needs to be auto or exact where engines have their own pool "
                f"(placement.rollout.pool is {name!r}), got {strategy}"
            )
        for role, placed in self.placement.auxiliary_roles.items():
            if placed.pool == name:
                raise ValueError(
                    f"placement.{role}.pool is {name!r}, the pool of the engines; engines can share only the pool "
                    f"{MAIN_POOL!r}"
                )
        return self

    @model_validator(mode="after")
    def _check_delta(self) -> RunConfig:
        if self.weight_sync.delta and self.rollout.engine.release_memory:
            raise ValueError(
                "weight_sync.delta needs engines that keep their weights while the trainer works, got "
                "rollout.engine.release_memory: true"
            )
        return self

    @property
    @override
    def policy_updates(self) -> int:
        """Number of the policy's optimizer steps in the whole run: none in the warm-up of a critic."""
        sections = (use.section for use in self.algorithm.models())
        warmup = max((section.warmup_steps for section in sections if isinstance(section, CriticConfig)), default=0)
        return (self.trainer.steps - warmup) * self.algorithm.updates_per_step

    @property
    def auxiliary_updates(self) -> int:
        """Number of optimizer steps of each auxiliary model that is trained, those before the run included."""
        return (self.algorithm.pretraining_steps + self.trainer.steps) * self.algorithm.updates_per_step

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """YAML key -> section of each environment, `rollout.env` and those of sources."""
        sources = {f"{source.key}.env": source.config.env for source in self.data.resolved_sources}
        found = {"rollout.env": self.rollout.env, **sources}
        return {key: env for key, env in found.items() if env is not None}

    @property
    def disaggregated(self) -> bool:
        """Whether engines have their own pool of slots and receive weights over the network."""
        return self.placement.rollout.pool != MAIN_POOL

    def releases_engine_memory(self, device: str) -> bool:
        """Whether engines on `device`, `cpu` or `cuda`, free their memory while the trainer needs it."""
        wanted = self.rollout.engine.release_memory
        if self.rollout.engine.is_custom:
            return False
        return device == "cuda" and not self.disaggregated if wanted is None else wanted

    @property
    def nodes_per_engine(self) -> int:
        """Number of nodes that one engine spans: 1, or as many as its `rollout.tp` slots fill."""
        return max(1, self.rollout.tp // self.rollout_pool.slots_per_node)

    @property
    def rollout_pool(self) -> PoolConfig:
        """The pool of slots that the engines run on."""
        return self.placement.all_pools[self.placement.rollout.pool]

    @model_validator(mode="after")
    def _check_reward_terms(self) -> RunConfig:
        terms = sorted(self.reward.terms)
        if self.data.held_out_files and not self.reward.rules:
            raise ValueError(
                f"{next(iter(self.data.held_out_files))}: evaluation scores completions by rules, but reward.terms has "
                f"only models, {terms}; remove it, or add a rule (with weight: 0 it does not change the reward)"
            )
        if self.reward.models and self.algorithm.needs_greedy_baseline and self.schedule.type != "sync":
            raise ValueError(
                f"schedule.type: {self.algorithm.type} with reward models needs sync, got {self.schedule.type}: they "
                "do not score the greedy completions that a schedule samples with their groups"
            )
        self.algorithm.check_rewards(self.reward)
        return self

    @model_validator(mode="after")
    def _check_difficulty(self) -> RunConfig:
        difficulty = self.data.difficulty
        if difficulty is None:
            return self
        rules, term = self.reward.rules, difficulty.term or self.reward.eval_term
        if not rules or (term is not None and term not in rules):
            got = "reward.terms has only models" if not rules else f"got {term!r}"
            raise ValueError(f"data.difficulty.term needs the name of a rule of reward.terms, {rules}, {got}")
        if difficulty.retire_after is not None and self.schedule.type != "sync":
            raise ValueError(
                f"data.difficulty.retire_after needs schedule.type: sync, got {self.schedule.type}, which begins "
                "groups before it knows the pass rates of earlier ones"
            )
        if self.algorithm.needs_greedy_baseline and self.schedule.type == "sync":
            raise ValueError(
                f"data.difficulty: with schedule.type: sync, {self.algorithm.type} samples the greedy completions of "
                "all prompts before it knows pass rates; use schedule.type: async, or another algorithm"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> RunConfig:
        limit, rules = self.rollout.max_new_tokens, self.reward.rules
        for name, source in self.data.sources.items():
            key = f"data.sources.{name}"
            if source.max_new_tokens is not None and source.max_new_tokens > limit:
                raise ValueError(
                    f"{key}.max_new_tokens needs to be at most rollout.max_new_tokens = {limit}, got "
                    f"{source.max_new_tokens}"
                )
            for term in source.reward_terms or ():
                if term not in rules:
                    raise ValueError(f"{key}.reward_terms needs names of rules of reward.terms, {rules}, got {term!r}")
            for term in sorted(self.algorithm.terms_of_every_completion(self.reward) & set(rules)):
                if source.reward_terms is not None and term not in source.reward_terms:
                    raise ValueError(
                        f"{key}.reward_terms needs {term!r}, which {self.algorithm.type} looks at in every completion, "
                        f"got {source.reward_terms}"
                    )
            if source.reward_terms == [] and not self.reward.models:
                raise ValueError(f"{key}.reward_terms: needs at least one term, got none")
            if source.eval_path is not None and source.reward_terms == []:
                raise ValueError(f"{key}.eval_path: evaluation needs a rule, got reward_terms: []")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> RunConfig:
        if self.limits.kl is not None and self.algorithm.kl_loss is None and self.algorithm.kl_reward is None:
            raise ValueError("limits.kl needs algorithm.kl_loss or algorithm.kl_reward, which measure it, got null")
        return self

    @model_validator(mode="after")
    def _check_warmup_steps(self) -> RunConfig:
        steps = self.trainer.steps
        for use in self.algorithm.models():
            if isinstance(use.section, CriticConfig) and use.section.warmup_steps >= steps:
                raise ValueError(
                    f"algorithm.{use.field}.warmup_steps needs to be below trainer.steps, got "
                    f"{use.section.warmup_steps} >= {steps}: the policy would not be trained"
                )
        return self


class PreferenceConfig(SupervisedStageConfig):
    """Configuration of a stage on preference pairs: `trainer.batch_size` and `data.eval_size` count pairs."""


class ScoreModelConfig(Section):
    """The kind of score model that `megarl rm` trains."""

    kind: Literal["reward", "cost"] = "reward"
    """`reward`: the chosen answer is the better one and gets the higher score (arXiv 2203.02155, equation 1). `cost`:
    the chosen answer is the less harmful one and gets the lower score; where rows have safety labels, safe answers are
    trained to score below 0 and unsafe ones above (arXiv 2310.12773, equations 6 and 7)."""


class RmConfig(PreferenceConfig):
    """`megarl rm`: training of a reward or cost model on preference pairs."""

    rm: ScoreModelConfig = ScoreModelConfig()
    """The score model to train."""


class DirectPreferenceConfig(Section):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = Field(default=0.1, gt=0)
    """Scale of the implicit reward: an answer's is beta * (log pi - log pi_reference)."""

    nll: float = Field(default=0.0, ge=0)
    """Factor of the mean negative log-likelihood per token of the chosen answer, as in RPO (arXiv 2404.19733). 0: plain
    DPO."""

    reference: FrozenModelConfig = FrozenModelConfig()
    """The reference model. Default: the initial policy; its log-probabilities are computed before the first step."""

    @model_validator(mode="after")
    def _check_reference(self) -> DirectPreferenceConfig:
        if self.reference.parallel is not None and self.reference.path is None:
            raise ValueError("reference.parallel needs reference.path: the default runs on the trainer's ranks")
        return self


class DpoConfig(PreferenceConfig):
    """`megarl dpo`: training of a policy on preference pairs, without a reward model."""

    dpo: DirectPreferenceConfig = DirectPreferenceConfig()
    """Loss and reference model of DPO."""


MODEL_SECTIONS = (ModelConfig, FrozenModelConfig, ModelRewardConfig)
"""Sections whose key `path` names a model."""


def replace_model_paths[S: Section](section: S, replace: Callable[[str, str], str], *, prefix: str = "") -> S:
    """Return the section with every model path in it and below, `model.path` included, replaced.

    Args:
        replace: takes the YAML key of a path and the path; returns the new path.
        prefix: YAML key of `section` with a final dot; empty for a whole configuration.
    """
    update: dict[str, object] = {}
    for name, value in section:
        if isinstance(value, Section):
            update[name] = replace_model_paths(value, replace, prefix=f"{prefix}{name}.")
        elif isinstance(value, dict):
            update[name] = {
                key: replace_model_paths(each, replace, prefix=f"{prefix}{name}.{key}.")
                if isinstance(each, Section)
                else each
                for key, each in value.items()
            }
    if isinstance(section, MODEL_SECTIONS) and section.path is not None:
        update["path"] = replace(f"{prefix}path", section.path)
    return section.model_copy(update=update)


def model_paths(config: Section) -> dict[str, str]:
    """Return YAML key -> path of every model that the configuration names."""
    found: dict[str, str] = {}

    def add(key: str, path: str) -> str:
        return found.setdefault(key, path)

    replace_model_paths(config, add)
    return found


def replace_data_paths[C: StageConfig](config: C, replace: Callable[[str, str], str]) -> C:
    """Return `config` with the path of every data file replaced; `replace` takes its YAML key and the path."""
    sources = {
        name: _with_files(source, replace, f"data.sources.{name}.") for name, source in config.data.sources.items()
    }
    data = _with_files(config.data.model_copy(update={"sources": sources}), replace, "data.")
    return config.model_copy(update={"data": data})


def data_paths(config: StageConfig) -> dict[str, str]:
    """Return YAML key -> path of every data file that the configuration names."""
    return {**config.data.training_files, **config.data.held_out_files}


def with_absolute_paths[C: StageConfig](config: C) -> C:
    """Return `config` with absolute paths, for processes with another working directory."""
    update = {"run_dir": _absolute(config.run_dir), "export_dir": _absolute(config.export_path)}
    with_data = replace_data_paths(config, lambda _, path: _absolute(path))
    return replace_model_paths(with_data, lambda _, path: _absolute(path)).model_copy(update=update)


def _with_files[F: (DataConfig, SourceConfig)](section: F, replace: Callable[[str, str], str], prefix: str) -> F:
    paths = {name: getattr(section, name) for name in ("path", "eval_path")}
    return section.model_copy(
        update={name: replace(f"{prefix}{name}", path) for name, path in paths.items() if path is not None}
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
