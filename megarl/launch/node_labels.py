"""Ray's labels of a node, by which pools choose theirs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Sequence

from megarl.errors import ConfigError
from megarl.launch.node_world import NodeWorld
from megarl.placement.hardware import QUERY_SECONDS
from megarl.placement.nodes import DOMAIN_LABEL, HET_GROUP_LABEL, RANK_LABEL
from megarl.process.child_processes import Children

_WORD = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"(?P<key>({_WORD}/)?{_WORD})=(?P<value>{_WORD})")


def parse_labels(words: Sequence[str]) -> dict[str, str]:
    """Labels of `KEY=VALUE[,KEY=VALUE...]`.

    Raises:
        ConfigError: one has not that form, with letters that Ray takes.
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


def own_labels(world: NodeWorld, nvlink_domain: str | None) -> dict[str, str]:
    """What is known of a node without the user."""
    labels = {RANK_LABEL: str(world.rank)}
    if world.het_group is not None:
        labels[HET_GROUP_LABEL] = str(world.het_group)
    if nvlink_domain is not None:
        labels[DOMAIN_LABEL] = nvlink_domain
    return labels


async def nvlink_domain(children: Children) -> str | None:
    """The NVLink domain that this node's GPUs share with other nodes'; None without, or where the driver is mute."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = children.start([command, "-q"], os.environ, when_parent_dies=signal.SIGKILL, is_heard=True)
    try:
        answer = await asyncio.wait_for((await asked.output()).read(), QUERY_SECONDS)
    except TimeoutError:
        asked.signal(signal.SIGKILL)
        return None
    return parse_nvlink_domain(answer.decode(errors="replace"))


def parse_nvlink_domain(text: str) -> str | None:
    """`<cluster>.<clique>` of the first GPU in `nvidia-smi -q`, for one that is part of a fabric."""
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
