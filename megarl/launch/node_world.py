"""A node's place among those of a run: from flags, from torchrun's environment or from Slurm's."""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megarl.errors import ConfigError

NUM_PORTS = 8
"""Ports at which a head may be found: one that is taken leads to the next."""
FIRST_PORT = 20000
PORT_SPAN = 12000
"""Below 32768, where systems begin to hand out ports of their own accord."""

SECRET_VARIABLE = "MEGARL_LAUNCH_SECRET"  # noqa: S105 -- its name, no secret
"""Any text that the nodes of a run share and others do not know: only they are then let in, by Ray too."""

HOW_TO_START = (
    "launch needs to know the nodes: start it with `srun --ntasks-per-node=1 megarl launch ...` in a Slurm job, with "
    "`torchrun --nnodes N --nproc-per-node 1 ... -m megarl launch ...`, or on every node with "
    "`megarl launch --nodes N --node-rank R --head HOST ...`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorld:
    """This node's place in a run, and where the first one is found."""

    rank: int
    """Of this node; 0 is the head."""
    size: int
    """Nodes of the run."""
    host: str
    """This node's name, for people."""
    head_hosts: tuple[str, ...]
    """Names or addresses at which the head may be found, the likeliest first; empty where this node is alone."""
    head_port: int | None
    """Where the head listens; None: at one of the ports that follow from the job."""
    job: str
    """Tells this start of this job from all others."""
    nodes: tuple[str, ...] = ()
    """Names of all nodes by rank; empty where they are not known beforehand."""
    het_group: int | None = None
    """Component of a heterogeneous Slurm job."""

    secret: str = field(default="", repr=False)
    """What only this job's nodes know; empty: nothing."""

    @property
    def token(self) -> str:
        """What a node shows the head, so that it is not taken for another job's."""
        return hashlib.sha256(f"{self.job} {self.secret}".encode()).hexdigest()[:32]

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports at which the head may listen, in the order in which they are tried."""
        if self.head_port is not None:
            return (self.head_port,)
        first = FIRST_PORT + int(hashlib.sha256(self.job.encode()).hexdigest()[:8], 16) % (PORT_SPAN - NUM_PORTS)
        return tuple(range(first, first + NUM_PORTS))

    def describe(self, rank: int) -> str:
        """A node that was not heard of yet, for people."""
        return f"node {self.nodes[rank]} (rank {rank})" if self.nodes else f"node rank {rank}"


def node_world(
    environment: Mapping[str, str], *, rank: int | None = None, size: int | None = None, head: str | None = None
) -> NodeWorld:
    """This node's place, from the flags where they are given, else from torchrun's environment, else from Slurm's.

    The secret is that of the environment.

    Args:
        rank: `--node-rank`.
        size: `--nodes`.
        head: `--head`, `HOST[:PORT]`; with torchrun or Slurm, in the place of what they say.

    Raises:
        ConfigError: neither says enough, or a node has more than one process.
    """
    world = _place(environment, rank, size, head)
    return replace(world, secret=environment.get(SECRET_VARIABLE, ""))


def _place(environment: Mapping[str, str], rank: int | None, size: int | None, head: str | None) -> NodeWorld:
    if size is not None:
        return _from_flags(rank, size, head)
    if rank is not None:
        raise ConfigError(f"--node-rank needs --nodes and --head, got --node-rank {rank} alone")
    hosts, port = ((), None) if head is None else _split(head)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _from_torchrun(environment, hosts, port)
    if "SLURM_JOB_ID" in environment:
        return _from_slurm(environment, hosts, port)
    raise ConfigError(HOW_TO_START)


def _from_flags(rank: int | None, size: int, head: str | None) -> NodeWorld:
    if size < 1:
        raise ConfigError(f"--nodes needs at least 1, got {size}")
    if rank is None and size == 1:
        rank = 0
    if rank is None or not 0 <= rank < size:
        raise ConfigError(f"--nodes {size} needs --node-rank from 0 to {size - 1}, got {rank}")
    if head is None and size > 1:
        raise ConfigError(f"--nodes {size} needs --head, the name or address of node rank 0")
    hosts, port = ((), None) if head is None else _split(head)
    return NodeWorld(
        rank=rank,
        size=size,
        host=socket.gethostname(),
        head_hosts=hosts,
        head_port=port,
        job=f"flags {head} {size}",
    )


def _from_torchrun(environment: Mapping[str, str], hosts: tuple[str, ...], port: int | None) -> NodeWorld:
    local_size = int(environment["LOCAL_WORLD_SIZE"])
    if local_size != 1:
        raise ConfigError(f"launch needs one process a node: torchrun --nproc-per-node 1, got {local_size}")
    # The run id is "none" unless it is given; the port, which torchrun draws anew, tells such runs apart.
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return NodeWorld(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        host=socket.gethostname(),
        head_hosts=hosts or (environment["MASTER_ADDR"],),
        head_port=port,
        job=" ".join(("torchrun", *(environment.get(name, "") for name in names))),
    )


def _from_slurm(environment: Mapping[str, str], hosts: tuple[str, ...], port: int | None) -> NodeWorld:
    job, host = environment["SLURM_JOB_ID"], environment.get("SLURMD_NODENAME", socket.gethostname())
    if "SLURM_STEP_ID" not in environment:
        # a batch script, or salloc's shell: SLURM_PROCID is 0 there too
        num_nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        if num_nodes > 1:
            raise ConfigError(
                f"launch runs on one of the {num_nodes} nodes of Slurm job {job}: start it on all of them, with "
                "`srun --ntasks-per-node=1 megarl launch ...`"
            )
        return NodeWorld(rank=0, size=1, host=host, head_hosts=(), head_port=port, job=f"slurm {job}", nodes=(host,))
    size, num_nodes = (int(environment[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
    if size != num_nodes:
        raise ConfigError(
            f"launch needs one process a node: srun --ntasks-per-node=1, got {size} tasks on {num_nodes} nodes"
        )
    groups = _het_groups(environment)
    step = expand_hostlist(environment["SLURM_STEP_NODELIST"])
    # A step over several components lists its nodes by name, and its ranks by component.
    nodes = tuple(name for group in groups for name in group if name in step) or step
    # Where a node's name does not resolve: srun's machine, which in a batch job is the first node.
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    return NodeWorld(
        rank=int(environment["SLURM_PROCID"]),
        size=size,
        host=host,
        head_hosts=hosts or (nodes[0], *([launcher] if launcher else [])),
        head_port=port,
        job=f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {job}.{environment['SLURM_STEP_ID']} {restart}",
        nodes=nodes,
        het_group=next((i for i, group in enumerate(groups) if host in group), None),
    )


def _het_groups(environment: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Nodes of each component of a heterogeneous job; empty where it is none."""
    names = (f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(int(environment.get("SLURM_HET_SIZE", "0"))))
    return [expand_hostlist(environment[name]) for name in names if name in environment]


def _split(head: str) -> tuple[tuple[str, ...], int | None]:
    host, colon, port = head.partition(":")
    if not host or (colon and not port.isdigit()) or ":" in port:
        raise ConfigError(f"--head needs HOST or HOST:PORT, got {head}")
    return (host,), int(port) if colon else None


def expand_hostlist(text: str) -> tuple[str, ...]:
    """The names that Slurm's short form stands for, in its order.

    >>> expand_hostlist("a[08-10,12],login,r[1-2]n[1-2]")
    ('a08', 'a09', 'a10', 'a12', 'login', 'r1n1', 'r1n2', 'r2n1', 'r2n2')

    Raises:
        ConfigError: it is none.
    """
    names: list[str] = []
    # commas within brackets part ranges, others part names
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_expand_ranges(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise ConfigError(f"{text!r} is no list of nodes as Slurm writes it")
    return tuple(names)


def _expand_ranges(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{whole!r} is no list of nodes as Slurm writes it")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
