"""Calls on torch's process groups that differ between gloo and NCCL."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

AT_ONCE = timedelta(milliseconds=1)
"""Shortest timeout of a wait."""

_CLOSING = 2**31 - 1
"""Gloo tag that no message has."""


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of tensors that the group exchanges."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def coalesced(group: dist.ProcessGroup, device: torch.device | None = None) -> AbstractContextManager[Any]:
    """Context manager that combines collectives of the same kind into one call; its value has their `works` at the end.

    torch has no public name for it; its own FSDP uses this one.

    Args:
        device: device of the tensors, for collectives that backends have no coalesced form of (broadcasts).
    """
    manager: AbstractContextManager[Any] = distributed_c10d._coalescing_manager(group, device, async_ops=True)
    return manager


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort a process group: over gloo, that also ends the waits of the other ranks."""
    if dist.get_backend(group) == "gloo":
        close_gloo_connections(group)
    else:
        group.abort()


def close_gloo_connections(group: Any) -> None:
    """Close this rank's connections, which fails all waits on them, here and on the other ranks.

    `ProcessGroupGloo.abort` does nothing, but gloo closes all connections when a wait times out. A wait for a peer
    whose connection is already broken fails without that, so one peer is not enough.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING).wait(AT_ONCE)
