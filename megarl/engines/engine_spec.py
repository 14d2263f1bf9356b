"""The settings with which an engine starts, and how they follow from a run's configuration.

Imports neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megarl.batch.trajectory import EngineRoutes
from megarl.config import RunConfig
from megarl.engines.unsupported_options import check_engine_support
from megarl.model_files.model_config import read_model_config, read_stop_token_ids

CPU_MAX_TOTAL_TOKENS = 65_536
CPU_MAX_RUNNING_REQUESTS = 128
PORTS_PER_REPLICA = 100


PauseMode = Literal["retract", "in_place", "abort"]
"""How an engine pauses for an update while requests run, see `ScheduleConfig.update`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Settings of one engine: plain data that can be sent to another process. `None` leaves the choice to SGLang.

    Examples:
        >>> EngineSpec(model_path="models/Qwen3-0.6B", tp=4, nnodes=2, node_rank=1).node_ranks
        range(2, 4)
    """

    model_path: str
    tp: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """Parameter dtype by its torch name."""
    fp32_lm_head: bool = False
    """Compute logits in float32, whatever `dtype` is."""
    trust_remote_code: bool = False
    """Whether SGLang may run code in the model folder."""
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    mem_fraction: float | None = None
    """Fraction of the free device memory for weights and KV cache."""
    releases_memory: bool = False
    """Whether the engine frees its memory for weights and KV cache while the trainer needs the devices."""
    holds_requests: bool = False
    """Whether requests wait, paused, while memory is released; else a release waits until none is in flight."""
    pause_mode: PauseMode = "retract"
    """What happens to requests in flight when the engine pauses."""
    waits_for_memory: bool = False
    """Whether the engine's schedulers wait after their imports, before they allocate device memory, for `StartGate`."""
    port: int | None = None
    """Port of the engine's process group. None: any free port."""
    nnodes: int = 1
    """Number of nodes, which have tp / nnodes TP ranks each, in order."""
    node_rank: int = 0
    """Index of the node that this spec is for; node 0 takes the requests."""
    node_name: str = ""
    """Name of that node in messages. Empty: not named, as the engine has one node only."""
    node_address: str = ""
    """Address at which the other nodes of the engine reach that node. Empty: it has one node only."""
    dist_init_addr: str | None = None
    """Address of node 0, `host:port`, at which the TP ranks of all nodes connect; None on a single node."""
    seed: int = 0
    deterministic: bool = False
    """Whether a completion depends only on its prompt, seed and weights, and not on the rest of the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion when sampled; see `read_stop_token_ids`."""
    policy_version: int = 0
    """Policy version of the weights in `model_path`."""
    log_dir: str | None = None
    """Folder for the logs of the scheduler processes. None: a temporary folder that is removed on shutdown."""
    start_timeout_seconds: float = 600.0
    round_timeout_seconds: float = 60.0
    """How long a TP rank waits for the boxes of a round."""
    answer_timeout_seconds: float = 60.0
    """Timeout for one step of a weight update."""
    routes: EngineRoutes | None = None
    """Set if completions come with the routes of their tokens."""
    extra_args: Mapping[str, object] = field(default_factory=dict)
    """Additional keyword arguments of `sglang.Engine`."""

    @property
    def node_ranks(self) -> range:
        """The TP ranks that run on the node."""
        size = self.tp // self.nnodes
        return range(size * self.node_rank, size * (self.node_rank + 1))

    def on_node(self, node_rank: int, name: str, address: str) -> EngineSpec:
        """Return the spec of the engine's part on one of its nodes, with a log folder of its own."""
        log_dir = self.log_dir and f"{self.log_dir}/node-{node_rank}"
        return replace(self, node_rank=node_rank, node_name=name, node_address=address, log_dir=log_dir)


def make_engine_spec(config: RunConfig, replica: int, device: str) -> EngineSpec:
    """Return the spec of engine `replica`, with the defaults of its device filled in.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: SGLang would not run the model as its config.json describes it.
    """
    file = Path(config.model.path) / "config.json"
    engine = config.rollout.engine
    if not engine.is_custom:
        check_engine_support(read_model_config(config.model.path), device, origin=str(file))
    cpu = device == "cpu"
    dtype = config.model.resolved_dtype(device)
    return EngineSpec(
        model_path=config.model.path,
        tp=config.rollout.tp,
        nnodes=config.nodes_per_engine,
        device=device,
        dtype=dtype,
        fp32_lm_head=config.model.fp32_lm_head,
        trust_remote_code=config.model.trust_remote_code,
        max_total_tokens=engine.max_total_tokens or (CPU_MAX_TOTAL_TOKENS if cpu else None),
        max_running_requests=engine.max_running_requests or (CPU_MAX_RUNNING_REQUESTS if cpu else None),
        mem_fraction=engine.mem_fraction,
        releases_memory=config.releases_engine_memory(device),
        holds_requests=config.schedule.type != "sync",
        pause_mode=_pause_mode(config),
        port=None if engine.base_port is None else engine.base_port + PORTS_PER_REPLICA * replica,
        seed=config.seed + replica,
        deterministic=cpu if engine.deterministic is None else engine.deterministic,
        stop_token_ids=read_stop_token_ids(config.model.path),
        log_dir=f"{config.run_dir}/logs/engine-{replica}",
        start_timeout_seconds=engine.start_timeout_seconds,
        round_timeout_seconds=config.weight_sync.timeout_seconds,
        answer_timeout_seconds=config.weight_sync.timeout_seconds / 2,
        extra_args=dict(engine.extra_args),
    )


def _pause_mode(config: RunConfig) -> PauseMode:
    """Return the pause mode of a run's engines; with `drain` no request is in flight at a push."""
    update = config.schedule.resolved().update
    return "retract" if update is None or update == "drain" else update
