"""Check the nodes of a Ray cluster before a run, through one actor per node, and report problems.

driver ---> actor on node a   versions, clock, facts      connect to b, c      all-reduce with b, c
       |--> actor on node b                               connect to a, c
       `--> actor on node c                               connect to a, b
"""

from __future__ import annotations

import glob
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from megarl.cluster.placement.assign import ClusterNode, cluster_nodes
from megarl.cluster.placement.pool import start_cluster
from megarl.config import StageConfig
from megarl.config.placement import PlacementConfig
from megarl.config.run import model_paths
from megarl.controller.preflight.cluster_findings import (
    ANSWER,
    GLOO,
    REACH,
    REDUCTION,
    Problem,
    UnreachableAddress,
    find_problems,
    find_reachability_problems,
    merge_problems,
    messages,
    nodes_table,
)
from megarl.controller.preflight.model_checks import will_write_model
from megarl.controller.preflight.node_report import (
    Address,
    Clock,
    EchoServer,
    Interface,
    NodeFacts,
    NodeReport,
    ProbeRequest,
    collect_facts,
    probe,
    versions,
)
from megarl.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One node's part of an all-reduce check, in which each rank contributes `rank + 1`."""

    backend: Backend
    host: str
    port: int
    """Port of the TCPStore at `host`."""
    rank: int
    size: int
    timeout_seconds: float
    gpu: int | None
    """Index of the GPU to use among those that the process sees; None: CPU."""


class ProbeActor:
    """Probes its own node and its connections to others; hosted by a Ray actor."""

    def __init__(self) -> None:
        # importing torch takes seconds: do it in the background during the calls that need no torch
        self._torch_import = threading.Thread(target=import_module, args=("torch.distributed",), daemon=True)
        self._torch_import.start()
        self._echo_server: EchoServer | None = None
        self._store: Store | None = None

    def versions(self) -> dict[str, str | None]:
        """Return `NodeReport.versions`; plain types only, so that a node with another megarl can be read."""
        return versions()

    def clock(self) -> float:
        """Return this node's time in Unix seconds."""
        return time.time()

    def collect_facts(self, request: ProbeRequest) -> NodeFacts:
        """Return the hardware, network and file system facts of this node."""
        return collect_facts(request)

    def start_echo_server(self, name: str, address: str) -> int:
        """Start an `EchoServer` and return its port."""
        self._echo_server = EchoServer(name, address=address)
        return self._echo_server.port

    def probe(self, own_name: str, addresses: Sequence[Address], seconds: float) -> list[tuple[Address, str]]:
        """Probe the echo servers of all nodes but this one; return those not reached, with the reason.

        Args:
            own_name: name of this node's echo server.
            addresses: the addresses of all nodes.
        """
        others = [address for address in addresses if address.name != own_name]
        reasons = zip(others, probe(others, seconds=seconds), strict=True)
        return [(address, reason) for address, reason in reasons if reason is not None]

    def open_store(self, address: str, seconds: float) -> int:
        """Start the TCPStore for all-reduce checks and return its port."""
        self._torch_import.join()
        from torch._C._distributed_c10d import TCPStore

        store = self._store = TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        return store.port

    def all_reduce(self, reduction: Reduction) -> None:
        """Take part in the all-reduce and check the sum.

        Raises:
            WorkerError: the sum is wrong.
            RuntimeError: torch.distributed reported an error.
        """
        # a second import at the same time may find torch._C without its submodules, which torch adds later
        self._torch_import.join()
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        timeout = timedelta(seconds=reduction.timeout_seconds)
        device = torch.device("cpu") if reduction.gpu is None else torch.device("cuda", reduction.gpu)
        store = TCPStore(reduction.host, reduction.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            reduction.backend,
            store=PrefixStore(reduction.backend, store),
            rank=reduction.rank,
            world_size=reduction.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        number = torch.tensor(reduction.rank + 1, device=device)
        dist.all_reduce(number)
        total, want = int(number), reduction.size * (reduction.size + 1) // 2
        dist.destroy_process_group()
        if total != want:
            raise WorkerError(f"the sum over {reduction.size} nodes is {total}, not {want}")


CONNECT_TIMEOUT_SECONDS = 5.0
"""Timeout of a connection between two nodes."""

GRACE_SECONDS = 2.0
"""Extra time for nodes to report a failed all-reduce: one that has not replied by then did not take part."""

GPU_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment of an actor that reserves no GPU but sees all GPUs of its node."""


@contextmanager
def cluster_probe(nodes: Sequence[ClusterNode], *, timeout_seconds: float) -> Iterator[ClusterProbe]:
    """Start a probe actor on each node for the duration of the block; the actors need no slots.

    Args:
        timeout_seconds: timeout of each reply.
    """
    remote_class = ray.remote(ProbeActor)
    actors: list[ray.actor.ActorHandle] = []
    try:
        for node in nodes:
            options: dict[str, object] = {"runtime_env": {"env_vars": GPU_VARIABLES}} if node.gpus else {}
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
            actors.append(
                remote_class.options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy, **options).remote()
            )
        yield ClusterProbe(nodes, actors, timeout_seconds)
    finally:
        for each in actors:
            ray.kill(each)


@dataclass(frozen=True, slots=True)
class _Reply:
    value: Any = None
    failure: str | None = None
    is_late: bool = False


class ClusterProbe:
    """The probe actors of a cluster and the checks made through them. Nodes are identified by their index."""

    def __init__(
        self, nodes: Sequence[ClusterNode], actors: Sequence[ray.actor.ActorHandle], timeout_seconds: float
    ) -> None:
        self._nodes, self._actors, self.timeout_seconds = nodes, actors, timeout_seconds

    def collect_reports(self, request: ProbeRequest) -> list[NodeReport]:
        """Return a report for every node, with the reason if it did not reply."""
        names = _unique_names([node.name for node in self._nodes])
        reports = [
            NodeReport(
                name=name, address=node.address, gpus=node.gpus, failure=reply.failure, versions=reply.value or {}
            )
            for name, node, reply in zip(
                names, self._nodes, self._gather([actor.versions.remote() for actor in self._actors]), strict=True
            )
        ]
        answered = [i for i, report in enumerate(reports) if report.failure is None]
        for i in answered:
            reports[i] = replace(reports[i], clock=self._clock(self._actors[i]))
        facts = self._gather([self._actors[i].collect_facts.remote(request) for i in answered])
        for i, reply in zip(answered, facts, strict=True):
            reports[i] = replace(reports[i], facts=reply.value, failure=reply.failure)
        return reports

    def check_reachability(self, reports: Sequence[NodeReport]) -> list[Problem]:
        """Find nodes that others cannot connect to at Ray's or gloo's address, skipping nodes that did not reply."""
        responding = [i for i, report in enumerate(reports) if report.facts is not None]
        servers = self._gather(
            [self._actors[i].start_echo_server.remote(str(i), reports[i].address) for i in responding]
        )
        problems = [
            _make_no_reply_problem(reports[i], server)
            for i, server in zip(responding, servers, strict=True)
            if server.failure
        ]
        ports = {i: server.value for i, server in zip(responding, servers, strict=True) if not server.failure}
        is_single_host = len({report.address for report in reports}) == 1
        addresses = ray.put(
            [
                Address(name=str(i), host=host, port=port)
                for i, port in ports.items()
                for host in _hosts(reports[i], is_single_host)
            ]
        )
        seconds = min(CONNECT_TIMEOUT_SECONDS, self.timeout_seconds)
        replies = self._gather([self._actors[i].probe.remote(str(i), addresses, seconds) for i in ports])
        unreachable: list[UnreachableAddress] = []
        for i, reply in zip(ports, replies, strict=True):
            if reply.failure:
                problems.append(_make_no_reply_problem(reports[i], reply))
                continue
            for address, reason in reply.value:
                target = reports[int(address.name)]
                unreachable.append(
                    UnreachableAddress(
                        source=reports[i].name,
                        target=target.name,
                        address=_describe_address(target, address),
                        reason=reason,
                    )
                )
        return [*merge_problems(problems), *find_reachability_problems(unreachable, len(reports))]

    def all_reduce(self, reports: Sequence[NodeReport], backend: Backend) -> list[Problem]:
        """Find nodes that fail in, or do not join, an all-reduce over all nodes; all nodes must have replied so far."""
        members = _reduction_members(reports, backend)
        if len(members) < 2:
            return []
        first = members[0]
        (store,) = self._gather([self._actors[first].open_store.remote(reports[first].address, self.timeout_seconds)])
        if store.failure:
            return [_make_reduction_problem(reports[first], backend, store)]
        reductions = [
            Reduction(
                backend=backend,
                host=reports[first].address,
                port=store.value,
                rank=rank,
                size=len(members),
                timeout_seconds=self.timeout_seconds,
                gpu=_least_used_gpu(reports[i]) if backend == "nccl" else None,
            )
            for rank, i in enumerate(members)
        ]
        refs = [self._actors[i].all_reduce.remote(one) for i, one in zip(members, reductions, strict=True)]
        failed = [
            (reports[i], reply)
            for i, reply in zip(members, self._gather(refs, GRACE_SECONDS), strict=True)
            if reply.failure
        ]
        late = [(report, reply) for report, reply in failed if reply.is_late]
        # a node that does not join makes the others fail, so only that one is reported
        return merge_problems([_make_reduction_problem(report, backend, reply) for report, reply in late or failed])

    def _clock(self, actor: ray.actor.ActorHandle) -> Clock | None:
        """Return a node's clock offset; None if the actor does not reply, which the next call reports."""
        requested_at = time.time()
        (reply,) = self._gather([actor.clock.remote()])
        if reply.failure:
            return None
        round_trip = time.time() - requested_at
        return Clock(ahead_seconds=reply.value - requested_at - round_trip / 2, uncertainty_seconds=round_trip / 2)

    def _gather(self, refs: Sequence[ray.ObjectRef], grace_seconds: float = 0.0) -> list[_Reply]:
        """Return the replies in the order of `refs`; those missing after the timeout are marked late."""
        if not refs:
            return []
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=self.timeout_seconds + grace_seconds)
        in_time = set(done)
        late = _Reply(failure=f"no answer within {self.timeout_seconds:g} s", is_late=True)
        return [_get_reply(ref) if ref in in_time else late for ref in refs]


def _get_reply(ref: ray.ObjectRef) -> _Reply:
    try:
        return _Reply(ray.get(ref))
    except RayTaskError as error:
        cause = error.cause or error
        return _Reply(failure=f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}")
    except RayError as error:
        # if the process failed to start, the last line of the trace has the reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _Reply(failure=f"the probe process failed to start: {lines[-1] if lines else type(error).__name__}")


def _make_no_reply_problem(report: NodeReport, reply: _Reply) -> Problem:
    return Problem(category=ANSWER, nodes=(report.name,), message=str(reply.failure))


def _make_reduction_problem(report: NodeReport, backend: Backend, reply: _Reply) -> Problem:
    assert report.facts is not None, report
    gloo = report.facts.gloo
    over = (
        f"NCCL, NCCL_SOCKET_IFNAME={report.facts.nccl or 'not set'}"
        if backend == "nccl"
        else f"{_describe_gloo(gloo)} ({gloo.address})"
    )
    message = f"all-reduce with the other nodes failed over {over}: {reply.failure}"
    return Problem(category=REDUCTION, nodes=(report.name,), message=message)


def _unique_names(names: Sequence[str]) -> list[str]:
    """Number nodes with equal names: several on one host without `megarl launch` node ranks."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return result


def _hosts(report: NodeReport, is_single_host: bool) -> list[str]:
    """Return the addresses at which others must reach the node; loopback counts only if all nodes share one host."""
    assert report.facts is not None, report
    gloo = report.facts.gloo
    counts = gloo.address is not None and (is_single_host or not gloo.is_loopback)
    return list(dict.fromkeys([report.address, *([gloo.address] if counts and gloo.address else [])]))


def _describe_address(report: NodeReport, address: Address) -> str:
    """Format the address, with the reason why gloo listens on it if that is not Ray's address."""
    if report.facts is None or address.host == report.address:
        return str(address)
    return f"{address} ({_describe_gloo(report.facts.gloo)})"


def _describe_gloo(interface: Interface) -> str:
    why = "GLOO_SOCKET_IFNAME" if interface.is_chosen else "its host name"
    return f"gloo on {interface.name or 'an unknown interface'}, by {why}"


def _reduction_members(reports: Sequence[NodeReport], backend: Backend) -> list[int]:
    """Return the indices of the nodes that take part; with NCCL one per host, as it refuses two ranks on one GPU."""
    if backend == "gloo":
        return list(range(len(reports)))
    machines: dict[str, int] = {}
    for i, report in enumerate(reports):
        if report.facts is not None and report.facts.gpus:
            machines.setdefault(report.address, i)
    return list(machines.values())


def _least_used_gpu(report: NodeReport) -> int:
    """Return the index, among the GPUs that the actor sees, of the one with the least memory in use."""
    assert report.facts is not None, report
    used = [gpu.used_bytes or 0 for gpu in report.facts.gpus]
    return used.index(min(used))


LOG_WIDTH = 160
"""Width of the table in characters if stderr is not a terminal."""

REDUCTION_PREREQUISITES = (ANSWER, "torch", GLOO, REACH)
"""The all-reduce check is skipped if there is a problem in one of these categories: it would time out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPaths:
    """Absolute paths that every node must be able to use, by configuration key."""

    readable: Mapping[str, str] = field(default_factory=dict)
    """Data files and model folders that every node must read."""
    writable: Mapping[str, str] = field(default_factory=dict)
    """Folders, existing on the driver's node, that every node must write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCheck:
    """Result of a check of all nodes."""

    reports: tuple[NodeReport, ...]
    problems: tuple[Problem, ...]
    seconds: float

    @property
    def messages(self) -> list[str]:
        """One message per problem."""
        return messages(self.problems, len(self.reports))

    @property
    def summary(self) -> str:
        """One line for the log: number of nodes and duration."""
        count = len(self.reports)
        return f"{count} {'node' if count == 1 else 'nodes'} checked in {self.seconds:.1f} s"


def check_nodes_or_raise(placement: PlacementConfig, paths: RequiredPaths) -> str | None:
    """Check the nodes of the joined cluster and return a one-line summary for the log.

    Returns None without checking if `placement.node_checks` is false, or unset and there is only one node.

    Raises:
        ConfigError, WorkerError: all problems, one per line; a table of the nodes is printed to stderr.
    """
    nodes = cluster_nodes()
    is_due = len(nodes) > 1 if placement.node_checks is None else placement.node_checks
    if not is_due:
        return None
    check = check_nodes(nodes, paths, placement)
    if not check.problems:
        return check.summary
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=LOG_WIDTH)
    console.print(nodes_table(check.reports, check.problems))
    error_type = WorkerError if any(p.category in (ANSWER, REACH, REDUCTION) for p in check.problems) else ConfigError
    raise error_type("\n".join(check.messages))


def required_paths(config: StageConfig) -> RequiredPaths:
    """Return the paths that a run needs on every node; `config` has absolute paths."""
    data = {**config.data.training_files, **config.data.held_out_files}
    readable = {**{key: str(_existing_part(path)) for key, path in data.items()}, **model_paths(config)}
    if will_write_model(config):
        del readable["model.path"]
    writable = {"run_dir": config.run_dir}
    if not Path(config.export_path).is_relative_to(config.run_dir):
        writable["export_dir"] = config.export_path
    return RequiredPaths(
        readable=readable,
        writable={key: str(_existing_parent(Path(folder))) for key, folder in writable.items()},
    )


def _existing_part(path: str) -> Path:
    """Return the path of a data file; of a pattern, the folder whose name has no wildcards."""
    found = Path(path)
    while not found.exists() and glob.has_magic(str(found)):
        found = found.parent
    return found


def _existing_parent(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_cluster(paths: RequiredPaths, placement: PlacementConfig) -> ClusterCheck:
    """Join the cluster at RAY_ADDRESS, run `check_nodes` on it, and disconnect.

    Raises:
        ConfigError: no cluster responds at RAY_ADDRESS, or a folder of `paths.writable` cannot be written here.
    """
    try:
        start_cluster(placement)
        return check_nodes(cluster_nodes(), paths, placement)
    finally:
        ray.shutdown()


def check_nodes(nodes: Sequence[ClusterNode], paths: RequiredPaths, placement: PlacementConfig) -> ClusterCheck:
    """Probe all nodes and return their reports with the problems found; no process is left running.

    Raises:
        ConfigError: a folder of `paths.writable` cannot be written here.
    """
    started = time.perf_counter()
    timeout = placement.node_check_timeout_seconds
    with _probe_request(paths) as request, cluster_probe(nodes, timeout_seconds=timeout) as probe:
        reports = probe.collect_reports(request)
        held = ray.cluster_resources().get("GPU", 0.0) - ray.available_resources().get("GPU", 0.0)
        problems = find_problems(reports, gpus_held=held)
        problems += probe.check_reachability(reports)
        backends: list[Backend] = ["gloo"] if placement.device == "cpu" else ["gloo", "nccl"]
        for backend in backends:
            if not any(problem.category in (*REDUCTION_PREREQUISITES, REDUCTION) for problem in problems):
                problems += probe.all_reduce(reports, backend)
    seconds = time.perf_counter() - started
    return ClusterCheck(reports=tuple(reports), problems=tuple(problems), seconds=seconds)


@contextmanager
def _probe_request(paths: RequiredPaths) -> Iterator[ProbeRequest]:
    """Create a marker file in every writable folder for the duration of the block, and yield the probe request."""
    token = f".megarl-node-check-{uuid.uuid4().hex[:8]}"
    with ExitStack() as files:
        for key, folder in paths.writable.items():
            path = Path(folder) / token
            files.callback(path.unlink, missing_ok=True)
            try:
                path.touch()
            except OSError as error:
                raise ConfigError(f"{key}: {folder} cannot be written: {error.strerror}") from error
        yield ProbeRequest(readable=paths.readable, writable=paths.writable, token=token)
