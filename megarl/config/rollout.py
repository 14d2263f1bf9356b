"""The sections `rollout`, `schedule` and `weight_sync`: sampling, how far it runs ahead, and the engines' weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.config.engine_options import LAYOUT_OPTIONS, find_option_problems
from megarl.config.section import Section, expand_home


class HarnessConfig(Section):
    """A program that runs an episode through an OpenAI-compatible endpoint, in training and evaluation."""

    command: list[str] | None = None
    """Program and arguments. It gets the task as JSON on stdin, and the endpoint in the environment variables
    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, for Anthropic's SDK also in `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`. Either this or `path`."""

    path: str | None = None
    """Import path, `package.module:name`, of an async function `run(task, base_url, api_key, **kwargs)` that runs in
    the rollout worker. Either this or `command`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function; for a command, `kwargs` of its task."""

    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""

    include_answer: bool = False
    """Give the command the field `data.fields.answer` of the row too. A tool that runs what the policy writes could
    read it there."""

    max_turns: int = Field(default=16, ge=1)
    """Number of replies after which an episode ends with `finish_reason: turns`."""

    max_seconds: float = Field(default=120.0, gt=0)
    """Duration after which an episode ends before its next turn, with `finish_reason: seconds`; pauses of the engines
    do not count. A program that neither ends nor asks for another turn by then has failed."""

    max_calls: int | None = Field(default=None, ge=1)
    """Number of tool calls, as `tool_parser` finds them, after which an episode ends with `finish_reason: calls`.
    Default: no limit."""

    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one reply. Default: what is left of `rollout.max_new_tokens`, so that turns which a
    program requests in parallel wait for one another."""

    max_programs: int = Field(default=32, ge=1)
    """Largest number of episodes that a rollout worker runs at the same time; others wait."""

    tool_parser: str | None = None
    """Name of SGLang's parser for tool calls, as `--tool-call-parser` has it. Default: none, and requests with tools
    are refused."""

    reasoning_parser: str | None = None
    """Name of SGLang's parser for thoughts, as `--reasoning-parser` has it. Default: none, thoughts are part of the
    reply."""

    forks: Literal["forbid", "allow"] = "allow"
    """What to do if a request does not continue the tokens before, because the program has rewritten its history or the
    chat template rewrites earlier turns. `allow`: it becomes another segment of the episode. `forbid`: it is
    refused."""

    host: str = "127.0.0.1"
    """Address that the endpoint listens at. Programs on other hosts need one that they can reach."""

    @field_validator("command")
    @classmethod
    def _expand_home(cls, command: list[str] | None) -> list[str] | None:
        return None if command is None else [os.path.expanduser(word) for word in command]

    @model_validator(mode="after")
    def _check_program(self) -> HarnessConfig:
        if (self.command is None) == (self.path is None):
            got = "neither" if self.command is None else "both"
            raise ValueError(f"command and path: one of them names the program, got {got}")
        if self.command is not None and not self.command:
            raise ValueError("command needs a program, got an empty list")
        if self.path is not None and (self.env or self.include_answer):
            name = "env" if self.env else "include_answer"
            raise ValueError(f"{name} belongs to a command, got it with path = {self.path}; remove it")
        return self

    @property
    def label(self) -> str:
        """The program, for messages."""
        return " ".join(self.command or [self.path or ""])


class SamplingConfig(Section):
    """Sampling of completions in training. Evaluation is greedy."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. The log-probabilities of engines and trainer refer to the scaled distribution."""

    top_p: float = 1.0
    """Needs to be 1, all tokens: training on nucleus samples is biased, since log-probabilities are those of the full
    distribution."""

    top_k: int = -1
    """Needs to be -1, all tokens, for the same reason."""

    @model_validator(mode="after")
    def _check_full_distribution(self) -> SamplingConfig:
        for name, full in (("top_p", 1.0), ("top_k", -1)):
            if (got := getattr(self, name)) != full:
                raise ValueError(
                    f"{name} needs to be {full:g} in training, got {got:g}: completions would come from a truncated "
                    "distribution, while ratios and mismatch metrics compare the full ones and cannot see the "
                    "difference"
                )
        return self


class EngineConfig(Section):
    """Settings of the engines. All keys but `type`, `kwargs` and `start_timeout_seconds` are those of SGLang."""

    type: str = "sglang"
    """`sglang`, or the import path of an engine outside the package, `package.module:Class`, of which an object is
    created in a process for each replica. It needs `weight_sync.strategy: gather_hf` and engines on the trainer's
    slots."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an engine outside the package."""

    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the free GPU memory for weights and KV cache. Default: where engines share GPUs with the trainer, the
    largest with which all phases of a step fit, by the estimate of `megarl check --gpu`; elsewhere SGLang's."""

    release_memory: bool | None = None
    """Free the engines' memory for weights and KV cache while the trainer needs the devices. On CPU, engines drop the
    contents and keep the memory. Default: true on CUDA where engines share the devices."""

    max_total_tokens: int | None = Field(default=None, ge=1)
    """Capacity of the KV cache in tokens. Default: 65,536 on CPU, SGLang's on GPU."""

    max_running_requests: int | None = Field(default=None, ge=1)
    """Largest number of sequences decoded in one batch. Default: 128 on CPU, SGLang's on GPU."""

    deterministic: bool | None = None
    """Make completions depend only on prompt, seed and weights, so that a run can be reproduced exactly. Reduces
    throughput on CUDA. Default: true on CPU, false on CUDA."""

    base_port: int | None = Field(default=None, ge=1024, le=65535)
    """First port of the engines' process groups: replica i uses base_port + 100 * i. Default: free ports."""

    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take to start."""

    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of SGLang, by the names of `sglang.Engine`'s arguments. Options with which a weight sync cannot
    work, or tokens would not be sampled from the model's distribution, are refused with the reason."""

    @property
    def ep_size(self) -> int:
        """Expert-parallel size of one engine."""
        return int(self.extra_args.get("ep_size", 1))

    @property
    def attn_dp_size(self) -> int:
        """Number of groups of an engine's ranks between which requests are distributed; each attends with its ranks."""
        extra = self.extra_args
        return int(extra.get("attn_dp_size", extra.get("dp_size", 1) if extra.get("enable_dp_attention") else 1))

    @property
    def layout_options(self) -> dict[str, Any]:
        """Those of `extra_args` besides `ep_size` that change which rank of an engine holds which weights."""
        return {name: self.extra_args[name] for name in LAYOUT_OPTIONS if name in self.extra_args}

    @property
    def is_custom(self) -> bool:
        """Whether the engine is one outside the package."""
        return self.type != "sglang"

    @model_validator(mode="after")
    def _check_type(self) -> EngineConfig:
        if not self.is_custom:
            if self.kwargs:
                raise ValueError("kwargs are those of an engine outside the package, got some with type = sglang")
            return self
        if ":" not in self.type:
            raise ValueError(f"type needs to be sglang or package.module:Class, got {self.type!r}")
        for name, field in type(self).model_fields.items():  # a run's own file has the defaults too
            default = field.get_default(call_default_factory=True)
            if name not in ("type", "kwargs", "start_timeout_seconds") and getattr(self, name) != default:
                raise ValueError(f"{name} is an option of SGLang, got it with type = {self.type}; remove it")
        return self

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, extra_args: dict[str, Any]) -> dict[str, Any]:
        problems = list(find_option_problems(extra_args))
        if problems:
            raise ValueError("; ".join(problems))
        return {name: expand_home(value) if isinstance(value, str) else value for name, value in extra_args.items()}


class AgentConfig(Section):
    """The agent that turns a prompt into a trajectory, in training and evaluation."""

    path: str = "megarl.rollout.agents.single_turn:single_turn"
    """Import path of the agent, `package.module:name`: a function `async def run(episode, **kwargs)`, or a class whose
    method `async def run(self, episode)` does the same. A class is created once in each rollout worker. Either returns
    a trajectory, usually `episode.trajectory()`. Default: one completion of the prompt."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the constructor of the class."""


class EnvironmentConfig(Section):
    """An environment that the policy talks with in messages, in training and evaluation."""

    path: str
    """Import path of the environment, `package.module:Class`: a class with the methods `reset(task)`, `step(reply)` and
    `close()`, async or not, of which an object is created for each episode. megarl has
    `megarl.rollout.environments.calculator:Calculator` and `megarl.rollout.environments.guess:Guess`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    max_turns: int = Field(default=8, ge=1)
    """Number of replies after which an episode ends with `finish_reason: turns`."""

    max_seconds: float = Field(default=60.0, gt=0)
    """Duration after which an episode ends before its next turn, with `finish_reason: seconds`; pauses of the engines
    do not count. It is also what the environment's methods may take: one that has not returned by then fails."""

    max_calls: int | None = Field(default=None, ge=1)
    """Number of tool calls, as the environment counts them, after which an episode ends with `finish_reason: calls`.
    Default: no limit."""

    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one reply. Default: what is left of `rollout.max_new_tokens`."""

    max_message_bytes: int = Field(default=8192, ge=1)
    """Longer contents of messages of the environment are cut to so many bytes of UTF-8."""

    forks: Literal["forbid", "allow"] = "forbid"
    """What to do if the chat template rewrites earlier turns, such as without their thoughts. `forbid`: such a template
    is refused. `allow`: the rewritten conversation becomes another segment of the episode."""


class RolloutConfig(Section):
    """Generation of completions: engines, sampling and rollout workers."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size of one engine. Engines with a pool of their own (placement.rollout.pool) may have more ranks
    than a node has slots: each spans tp / slots_per_node nodes, which becomes SGLang's nnodes."""

    replicas: int = Field(default=1, ge=1)
    """Number of engines, each with a replica of the policy."""

    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum length of a completion in tokens. An agent with several turns has as many for all that follows the
    prompt, observations included."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of completions in training."""

    agent: AgentConfig = AgentConfig()
    """What runs an episode: by default one completion, else a function or class of your own."""

    env: EnvironmentConfig | None = None
    """An environment that talks with the policy, instead of an agent. Default: none."""

    harness: HarnessConfig | None = None
    """A program that runs an episode through an OpenAI-compatible endpoint, instead of an agent. Default: none."""

    engine: EngineConfig = EngineConfig()
    """Settings of the engines."""

    workers: int = Field(default=1, ge=1)
    """Number of rollout workers: processes that run agents and rewards."""

    request_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit of one episode in seconds, from the first token that a rollout worker knows of, so that the engine's
    queue does not count. An episode over it is truncated, with `finish_reason: seconds`: its tokens so far are scored
    and trained on. Pauses of the engines do not count."""

    no_progress_seconds: float = Field(default=300.0, gt=0)
    """Longest time in seconds in which an engine that owes completions shows no progress: no completion, no new token,
    and no other request that it samples first. A sample that has waited for so long is asked for once more, on another
    engine if there is one, and then left out of the step. Pauses of the engines do not count."""

    @model_validator(mode="after")
    def _check_environment(self) -> RolloutConfig:
        if self.env is not None and self.agent != AgentConfig():
            raise ValueError(
                f"agent and env: one of them runs an episode, got both, agent.path = {self.agent.path} and env.path = "
                f"{self.env.path}; remove one"
            )
        if self.harness is not None and (self.env is not None or self.agent != AgentConfig()):
            other = f"env.path = {self.env.path}" if self.env is not None else f"agent.path = {self.agent.path}"
            raise ValueError(
                f"harness: one of agent, env and harness runs an episode, got harness ({self.harness.label}) and "
                f"{other}; remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_expert_parallelism(self) -> RolloutConfig:
        if self.engine.ep_size not in (1, self.tp):
            raise ValueError(
                f"engine.extra_args: ep_size needs to be 1 or rollout.tp = {self.tp}, got {self.engine.ep_size}"
            )
        if self.engine.extra_args.get("moe_a2a_backend") == "deepep" and self.engine.ep_size != self.tp:
            raise ValueError(
                f"engine.extra_args: moe_a2a_backend: deepep needs ep_size = rollout.tp = {self.tp}, got "
                f"{self.engine.ep_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_data_parallel_attention(self) -> RolloutConfig:
        extra, tp, groups = self.engine.extra_args, self.tp, self.engine.attn_dp_size
        if extra.get("dp_size", 1) > 1 and not extra.get("enable_dp_attention"):
            raise ValueError(
                f"engine.extra_args: dp_size counts groups within the ranks of an engine and needs "
                f"enable_dp_attention: true, got dp_size = {extra['dp_size']}; rollout.replicas counts engines"
            )
        if "attn_dp_size" in extra and extra.get("dp_size", 1) > 1:
            raise ValueError("engine.extra_args: attn_dp_size and dp_size state the same size; remove one")
        if tp % groups:
            name = "attn_dp_size" if "attn_dp_size" in extra else "dp_size"
            raise ValueError(
                f"engine.extra_args: {name} needs to divide rollout.tp, got {tp} % {groups} = {tp % groups}"
            )
        if (dense := extra.get("moe_dense_tp_size")) not in (None, 1, tp):
            raise ValueError(f"engine.extra_args: moe_dense_tp_size needs to be 1 or rollout.tp = {tp}, got {dense}")
        if extra.get("enable_dp_lm_head") and groups == 1:
            raise ValueError("engine.extra_args: enable_dp_lm_head needs attn_dp_size above 1, got 1")
        return self


ScheduleType = Literal["sync", "one_step_off", "async"]

_SCHEDULE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"lookahead": 0, "max_staleness": 0, "late": "wait", "update": "drain", "adapt_lookahead": False},
    "one_step_off": {"lookahead": 1, "max_staleness": 1, "late": "wait", "update": "drain", "adapt_lookahead": False},
    "async": {"lookahead": 3, "max_staleness": 8, "late": "wait", "update": "retract", "adapt_lookahead": True},
}
"""Settings by type; only `async` accepts others."""


IN_PLACE_ARGUMENTS: Mapping[str, object] = {
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
}
"""Arguments of SGLang that `update: in_place` sets."""

_IN_PLACE_REASONS: Mapping[str, str] = {
    "disable_overlap_schedule": "its scheduler would otherwise count one token of each request to the version after "
    "the one that sampled it",
    "disable_radix_cache": "new requests would otherwise use the KV cache of older weights",
    "chunked_prefill_size": "the KV cache of a prompt would otherwise be of two versions",
}


class ScheduleConfig(Section):
    """When groups are sampled and trained on. Versions count the steps: step t trains with the weights of t - 1."""

    type: ScheduleType = "sync"
    """`sync`: a step samples its batch, then trains on it. `one_step_off`: the next batch is sampled during the
    training of a step, and the push waits for it; steps repeat bitwise. `async`: engines never wait."""

    lookahead: int | None = Field(default=None, ge=0)
    """Number of batches that may be sampled or waiting besides the current one. It determines the mean staleness.
    Default: 3, at most max_staleness. With `sync` 0, with `one_step_off` 1."""

    adapt_lookahead: bool | None = None
    """Whether fewer groups are admitted while finished ones wait and steps do not: as many fewer as wait beyond the
    next batch. Samples are then younger where training is slower than generation. `lookahead` stays the upper bound.
    Default: true. With `sync` and `one_step_off`, false."""

    max_staleness: int | None = Field(default=None, ge=0)
    """No token is trained on that is older than so many versions. At least `lookahead`. Default: 8, at least
    `lookahead`. With `sync` 0, with `one_step_off` 1."""

    late: Literal["wait", "mask", "drop"] | None = None
    """What happens to groups that take longer than `max_staleness` allows. `wait`: steps wait for them in time, and
    nothing is lost. `mask`: steps do not wait, and tokens above the cap leave the loss. `drop`: they are discarded and
    replaced, which favors short completions; for comparisons. Default: `wait`."""

    update: Literal["drain", "retract", "in_place", "abort"] | None = None
    """How weights are pushed while requests run. `drain`: wait until none does. `retract`: pause, and recompute the
    prefixes with the new weights. `in_place`: continue on the KV cache of the old weights; the engines then schedule
    without overlap and cache no prefixes. `abort`: abort the requests, and continue them by new ones that begin with
    the tokens sampled so far. Default: `retract`. With `sync` and `one_step_off`, `drain`."""

    @model_validator(mode="after")
    def _check_type(self) -> ScheduleConfig:
        if self.type == "async":
            return self
        for key, value in _SCHEDULE_DEFAULTS[self.type].items():
            if getattr(self, key) not in (None, value):
                value, got = (str(setting).lower() for setting in (value, getattr(self, key)))  # as in YAML
                raise ValueError(
                    f"{key} needs to be {value} with type: {self.type}, got {got}; type: async takes other values"
                )
        return self

    @model_validator(mode="after")
    def _check_lookahead(self) -> ScheduleConfig:
        if self.lookahead is not None and self.max_staleness is not None and self.lookahead > self.max_staleness:
            raise ValueError(
                f"lookahead needs to be at most max_staleness, got {self.lookahead} > {self.max_staleness}: the last "
                f"of {self.lookahead + 1} open batches would be {self.lookahead} versions old when its turn comes"
            )
        return self

    def resolved(self) -> ScheduleConfig:
        """Return a copy without None: with the defaults filled in."""
        given = {key: getattr(self, key) for key in _SCHEDULE_DEFAULTS[self.type] if getattr(self, key) is not None}
        settings = {**_SCHEDULE_DEFAULTS[self.type], **given}
        if "max_staleness" not in given:
            settings["max_staleness"] = max(settings["lookahead"], settings["max_staleness"])
        settings["lookahead"] = min(settings["lookahead"], settings["max_staleness"])
        return self.model_copy(update=settings)

    def engine_problems(self, engine: EngineConfig) -> Iterator[str]:
        """Yield a sentence for each setting of the engines with which this schedule cannot work."""
        for name, value in IN_PLACE_ARGUMENTS.items() if self.update == "in_place" else ():
            if engine.extra_args.get(name, value) != value:
                yield (
                    f"schedule.update: in_place sets rollout.engine.extra_args.{name}, which needs to be "
                    f"{json.dumps(value)}, got {json.dumps(engine.extra_args[name])}: {_IN_PLACE_REASONS[name]}"
                )


class VerifyConfig(Section):
    """Comparison of all weights of the engines with the trainer's before engines serve them, by sums of their bits."""

    every: int = Field(default=1, ge=1)
    """Compare in the sync of every policy version that this number divides."""


class WeightSyncConfig(Section):
    """Transfer of the policy's weights from trainer to engines after each step."""

    strategy: Literal["auto", "gather_hf", "micro_dp", "exact"] = "auto"
    """`gather_hf`: gather full tensors over the trainer ranks and pass them on by their Hugging Face names. `micro_dp`:
    each rank receives only the shards that its engine rank needs and it does not hold, from its micro-DP group
    (HybridFlow). `exact`: the same, from any rank and for any parallel sizes. `auto`: `micro_dp` if the sizes divide
    and each engine is on one node, else `exact`. Engines with their own pool always use `exact`: they receive their
    shards from any rank over the network."""

    bucket_bytes: int = Field(default=256 * 2**20, ge=1)
    """Maximum size in bytes of a transfer bucket. A larger tensor gets a bucket of its own."""

    timeout_seconds: float = Field(default=300.0, gt=0)
    """Timeout in seconds of one weight sync; a longer one ends the run with an error."""

    abort_seconds: float = Field(default=10.0, gt=0)
    """A weight sync is aborted on all ranks if one of them fails, if one gives no sign of life for this many seconds,
    or if all wait for each other for this long. A rank that is busy may hold the others up three times as long."""

    delta: bool = False
    """Send only the elements that have changed since the previous sync, as places and values. Every sending rank keeps
    a copy of what it has sent, in host memory. The first sync, and the one after a failed sync or a restarted engine,
    sends all weights. Needs boxes (`micro_dp` or `exact`) and engines that keep their weights while the trainer
    works."""

    verify: VerifyConfig | None = VerifyConfig()
    """Compare what engines hold with what the trainer has sent, in every sync or some of them. An engine that differs
    does not serve the new weights, and the run ends with an error. null, the default with a custom engine: no
    comparison; coverage, dtypes and bytes are checked in every sync."""

    @model_validator(mode="after")
    def _check_delta(self) -> WeightSyncConfig:
        if self.delta and self.strategy == "gather_hf":
            raise ValueError(
                "weight_sync.delta needs weight_sync.strategy to be auto, micro_dp or exact: gather_hf always sends "
                "all weights"
            )
        return self
