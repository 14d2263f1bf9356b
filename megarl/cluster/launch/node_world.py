"""Rank of this node and location of the head, from flags, torchrun's environment or Slurm's."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.cluster.placement.assign import DOMAIN_LABEL, HET_GROUP_LABEL, RANK_LABEL
from megarl.cluster.placement.hardware import QUERY_TIMEOUT_SECONDS
from megarl.cluster.process.child_processes import ChildProcesses
from megarl.errors import ConfigError

FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"

_WITH_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?")
_WITHOUT = re.compile(r"((?P<hours>\d+):(?=\d+:\d+))?(?P<minutes>\d+)(:(?P<seconds>\d+))?")


def parse_time_limit(text: str) -> int:
    """Parse a time limit and return it in seconds.

    Raises:
        ConfigError: `text` has none of the forms in the manual of sbatch, or is zero.
    """
    found = _WITH_DAYS.fullmatch(text) or _WITHOUT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--time: needs {FORMS}, got {text!r}")
    parts = {name: int(value) for name, value in found.groupdict(default="0").items()}
    seconds = ((parts.get("days", 0) * 24 + parts["hours"]) * 60 + parts["minutes"]) * 60 + parts["seconds"]
    if not seconds:
        raise ConfigError(f"--time: needs a limit above zero, got {text!r}")
    return seconds


NUM_PORTS = 8
"""Number of ports the head may listen on; it takes the first free one."""
FIRST_PORT = 20000
PORT_SPAN = 12000
"""Ports start at `FIRST_PORT`; all stay below 32768, where the ephemeral port range of Linux begins."""

SECRET_VARIABLE = "MEGARL_LAUNCH_SECRET"  # noqa: S105 -- the name of the variable, not a secret
"""Environment variable with a secret shared by the nodes of a run: launch and Ray admit only these nodes."""

MIN_SECRET_CHARACTERS = 16
"""Minimum length of a secret: whoever reaches the head can test guesses of a short one."""

MAX_STEP_ID = 0xFFFFFFF0
"""Largest id of a step that srun starts. Slurm has larger ones for batch scripts (0xFFFFFFFB) and for the shell of
salloc with `use_interactive_step` (0xFFFFFFFA)."""

HOW_TO_DRAW = "`openssl rand -hex 32`"

HOW_TO_START = (
    "launch needs to know the nodes: start it with `srun --ntasks-per-node=1 megarl launch ...` in a Slurm job, with "
    "`torchrun --nnodes N --nproc-per-node 1 ... -m megarl launch ...`, or on every node with "
    "`megarl launch --nodes N --node-rank R --head HOST ...`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorld:
    """Rank of this node, size of the launch, and location of the head."""

    rank: int
    """Rank of this node; rank 0 is the head."""
    size: int
    """Number of nodes of the launch."""
    host: str
    """Name of this node, used in messages."""
    head_hosts: tuple[str, ...]
    """Host names or addresses of the head, the most likely first; empty if this is the only node."""
    head_port: int | None
    """Port on which the head listens; None: one of the ports derived from `job`."""
    job: str
    """Identifies this start of this job among all others."""
    nodes: tuple[str, ...] = ()
    """Names of all nodes by rank; empty if they are not known in advance."""
    het_group: int | None = None
    """Index of this node's component in a heterogeneous Slurm job; None in other jobs."""

    secret: str = field(default="", repr=False)
    """Secret shared by this job's nodes, see `with_secret`; empty: none, with `--insecure`."""

    @property
    def job_id(self) -> str:
        """Hash of `job`, by which the head of another job is recognized before any authentication."""
        return hashlib.sha256(self.job.encode()).hexdigest()[:32]

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports on which the head may listen, in the order in which they are tried."""
        if self.head_port is not None:
            return (self.head_port,)
        first = FIRST_PORT + int(hashlib.sha256(self.job.encode()).hexdigest()[:8], 16) % (PORT_SPAN - NUM_PORTS)
        return tuple(range(first, first + NUM_PORTS))

    def describe(self, rank: int) -> str:
        """Return the name of a node for messages; used before it has connected."""
        return f"node {self.nodes[rank]} (rank {rank})" if self.nodes else f"node rank {rank}"


def detect_node_world(
    environment: Mapping[str, str], *, rank: int | None = None, size: int | None = None, head: str | None = None
) -> NodeWorld:
    """Detect the rank of this node and the head, from flags if given, else from torchrun's or Slurm's environment.

    Args:
        rank: value of `--node-rank`.
        size: value of `--nodes`.
        head: value of `--head`, `HOST[:PORT]`; overrides what torchrun or Slurm report.

    Raises:
        ConfigError: flags and environment are insufficient, or a node has more than one process.
    """
    if size is not None:
        return _from_flags(rank, size, head)
    if rank is not None:
        raise ConfigError(f"--node-rank needs --nodes and --head, got --node-rank {rank} alone")
    hosts, port = ((), None) if head is None else _parse_head(head)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _from_torchrun(environment, hosts, port)
    if "SLURM_JOB_ID" in environment:
        return _from_slurm(environment, hosts, port)
    raise ConfigError(HOW_TO_START)


def with_secret(world: NodeWorld, environment: Mapping[str, str], *, insecure: bool) -> NodeWorld:
    """Return `world` with the secret in the environment; a launch of one node without one gets a random secret.

    Args:
        insecure: permit a launch in which anyone who reaches the ports of its nodes can execute code.

    Raises:
        ConfigError: there is no secret, or it is too short, or RAY_AUTH_MODE is set to another mode than `token`.
    """
    secret = environment.get(SECRET_VARIABLE, "")
    if secret and len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"{SECRET_VARIABLE} needs at least {MIN_SECRET_CHARACTERS} characters, got {len(secret)}: make one with "
            f"{HOW_TO_DRAW}"
        )
    if insecure:
        return replace(world, secret=secret)
    mode = environment.get("RAY_AUTH_MODE")
    if mode is not None and mode.lower() != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE={mode} lets anyone who reaches Ray's ports execute code: unset it, or pass --insecure"
        )
    if not secret and world.size > 1:
        raise ConfigError(
            f"launch needs a secret in {SECRET_VARIABLE}, the same on all {world.size} nodes, because Ray executes "
            f"code for anyone who reaches its ports: make one with {HOW_TO_DRAW}, or use launch/slurm/train.sbatch or "
            "launch/torchrun/hosts.sh, or pass --insecure if nobody else reaches these nodes"
        )
    return replace(world, secret=secret or secrets.token_hex(32))


def _from_flags(rank: int | None, size: int, head: str | None) -> NodeWorld:
    if size < 1:
        raise ConfigError(f"--nodes needs at least 1, got {size}")
    if rank is None and size == 1:
        rank = 0
    if rank is None or not 0 <= rank < size:
        raise ConfigError(f"--nodes {size} needs --node-rank from 0 to {size - 1}, got {rank}")
    if head is None and size > 1:
        raise ConfigError(f"--nodes {size} needs --head, the name or address of node rank 0")
    hosts, port = ((), None) if head is None else _parse_head(head)
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
    # The run id is "none" unless it is given; then the port, which torchrun chooses per run, distinguishes runs.
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
    groups = _het_groups(environment)
    if int(environment.get("SLURM_STEP_ID", MAX_STEP_ID + 1)) > MAX_STEP_ID:
        # a batch script or the shell of salloc: SLURM_PROCID is 0 there too
        num_nodes = sum(map(len, groups)) or int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        if num_nodes > 1:
            raise ConfigError(
                f"launch runs on one of the {num_nodes} nodes of Slurm job {job}; start it on all of them with "
                "`srun --ntasks-per-node=1 megarl launch ...`"
            )
        return NodeWorld(rank=0, size=1, host=host, head_hosts=(), head_port=port, job=f"slurm {job}", nodes=(host,))
    size, num_nodes = (int(environment[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
    if size != num_nodes:
        raise ConfigError(
            f"launch needs one process a node: srun --ntasks-per-node=1, got {size} tasks on {num_nodes} nodes"
        )
    step = expand_hostlist(environment["SLURM_STEP_NODELIST"])
    # A step over several components orders its node list by name, but its ranks by component.
    nodes = tuple(name for group in groups for name in group if name in step) or step
    # Fallback if the node name does not resolve: the node that runs srun, which in a batch job is the first one.
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
    """Return the nodes of each component of a heterogeneous job; empty for other jobs."""
    names = (f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(int(environment.get("SLURM_HET_SIZE", "0"))))
    return [expand_hostlist(environment[name]) for name in names if name in environment]


def _parse_head(head: str) -> tuple[tuple[str, ...], int | None]:
    host, colon, port = head.partition(":")
    if not host or (colon and not port.isdigit()) or ":" in port:
        raise ConfigError(f"--head needs HOST or HOST:PORT, got {head}")
    return (host,), int(port) if colon else None


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand a host list in Slurm's compact notation, preserving its order.

    Examples:
        >>> expand_hostlist("a[08-10,12],login,r[1-2]n[1-2]")
        ('a08', 'a09', 'a10', 'a12', 'login', 'r1n1', 'r1n2', 'r2n1', 'r2n2')

    Raises:
        ConfigError: `text` is not a host list.
    """
    names: list[str] = []
    # commas within brackets separate ranges, all others separate names
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_expand_ranges(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise ConfigError(f"launch cannot parse the Slurm host list {text!r}")
    return tuple(names)


def _expand_ranges(text: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"launch cannot parse the Slurm host list {hostlist!r}")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ConfigError(f"launch cannot parse the Slurm host list {hostlist!r}: {part} is no range")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


_WORD = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"(?P<key>({_WORD}/)?{_WORD})=(?P<value>{_WORD})")


def parse_labels(words: Sequence[str]) -> dict[str, str]:
    """Parse words of the form `KEY=VALUE[,KEY=VALUE...]` into a dict of labels.

    Raises:
        ConfigError: a word does not have this form, or has characters that Ray does not accept.
    """
    labels = {}
    for word in ",".join(words).split(",") if words else ():
        match = _LABEL.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"--labels needs KEY=VALUE of at most 63 letters, digits, '-', '_' and '.' each, got {word!r}"
            )
        labels[match["key"]] = match["value"]
    return labels


def find_node_labels(world: NodeWorld, nvlink_domain: str | None) -> dict[str, str]:
    """Return the labels that the launch sets itself: rank, component of a heterogeneous job, NVLink domain."""
    labels = {RANK_LABEL: str(world.rank)}
    if world.het_group is not None:
        labels[HET_GROUP_LABEL] = str(world.het_group)
    if nvlink_domain is not None:
        labels[DOMAIN_LABEL] = nvlink_domain
    return labels


async def query_nvlink_domain(children: ChildProcesses) -> str | None:
    """Return the multi-node NVLink domain of this node's GPUs; None if there is none or nvidia-smi does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    process = children.start([command, "-q"], os.environ, parent_death_signal=signal.SIGKILL, capture_output=True)
    try:
        output = await asyncio.wait_for((await process.output()).read(), QUERY_TIMEOUT_SECONDS)
    except TimeoutError:
        process.signal(signal.SIGKILL)
        return None
    return parse_nvlink_domain(output.decode(errors="replace"))


def parse_nvlink_domain(text: str) -> str | None:
    """Return `<cluster>.<clique>` of the first GPU in the output of `nvidia-smi -q`; None if it is not in a fabric."""
    fields: dict[str, str] = {}
    section = re.search(r"^ *Fabric *$\n(?P<body>(?:^ +.*$\n?){1,12})", text, re.MULTILINE)
    for line in section["body"].splitlines() if section else ():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower().replace(" ", ""), value.strip())
    cluster, clique = fields.get("clusteruuid", ""), fields.get("cliqueid", "")
    if not re.fullmatch(r"[0-9a-fA-F-]{36}", cluster) or not clique.isdigit() or not cluster.strip("0-"):
        return None
    return f"{cluster}.{clique}"
