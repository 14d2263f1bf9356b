"""Ray labels of a node, which placement pools select nodes by."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Sequence

from megarl.errors import ConfigError
from megarl.launch.node_world import NodeWorld
from megarl.placement.hardware import QUERY_TIMEOUT_SECONDS
from megarl.placement.nodes import DOMAIN_LABEL, HET_GROUP_LABEL, RANK_LABEL
from megarl.process.child_processes import ChildProcesses

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
