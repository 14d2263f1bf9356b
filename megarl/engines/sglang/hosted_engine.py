"""The subclass of `sglang.Engine` that an engine's host launches, which exposes its scheduler processes.

Requests that reach the engine together go to its schedulers in one message. SGLang sends a message for each request. A
scheduler that waits wakes up at the first one, so it computes a batch of a few prompts while the host still sends the
others, and further small batches after it:

one by one    host       | 1 | 2 | 3 | ... | 128 |
              scheduler      | 1 | 2 to 9 | 10 to 40 | ...
together      host       | 1 to 128 |
              scheduler             | 1 to 128 |
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.engines.sglang.scheduler_process import SchedulerProcess, forking_schedulers

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import PortArgs, ServerArgs
import asyncio
import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def make_tokenizer_manager_class() -> type[TokenizerManager]:
    """Return a subclass of SGLang's tokenizer manager that sends the requests of one event-loop iteration together."""
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class BatchingTokenizerManager(TokenizerManager):  # type: ignore[misc]
        """Its schedulers get all messages in the order in which they were sent."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            self._unsent: list[TokenizedGenerateReqInput] = []
            super().__init__(*args, **kwargs)

        def _dispatch_to_scheduler(self, obj: Any) -> None:
            if not isinstance(obj, TokenizedGenerateReqInput):
                self._send_requests()
                super()._dispatch_to_scheduler(obj)
                return
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_requests)
            self._unsent.append(copy.copy(obj))  # the caller decodes a field again that it has encoded to send it

        async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
            self._send_requests()
            await super()._async_dispatch_to_scheduler(obj)

        def _send_requests(self) -> None:
            requests, self._unsent = self._unsent, []
            if requests:
                single = len(requests) == 1
                super()._dispatch_to_scheduler(
                    requests[0] if single else BatchTokenizedGenerateReqInput(batch=requests)
                )

    return BatchingTokenizerManager


NO_BLOCKING_VARIABLE = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"
"""Environment variable of SGLang: "0" lets the launch of a later node of an engine return once it has started."""

ADDRESS_VARIABLE = "SGLANG_HOST_IP"
"""Environment variable of SGLang: address at which TP ranks of other nodes connect to those of this node.

Otherwise SGLang takes the address of the interface with the default route. If it leads elsewhere, the ranks wait for
each other forever.
"""


def set_node_variables(address: str) -> None:
    """Set the environment variables with which this process can host one of several nodes of an engine.

    Args:
        address: address of this node for the others, unless the user has set `ADDRESS_VARIABLE`.
    """
    os.environ[NO_BLOCKING_VARIABLE] = "0"
    os.environ.setdefault(ADDRESS_VARIABLE, address)


def make_engine_class(
    log_dir: str,
    *,
    gate: str | None,
    forks: bool,
    before_launch: Callable[[Path], None],
    on_launch: Callable[[list[BaseProcess]], None],
) -> type[Engine]:
    """Return a subclass of `sglang.Engine`; imports SGLang, which takes seconds.

    Args:
        log_dir: folder for the logs of the scheduler processes.
        gate: the file of the `StartGate` at which they wait after their imports; None: they do not wait.
        forks: fork the schedulers from the fork server instead of spawning them.
        before_launch: called before the schedulers are started, with the file in shared memory in which SGLang's
            processes publish their load and which they do not remove.
        on_launch: called with the processes that have been started.
    """
    from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

    class HostedEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = SchedulerProcess(log_dir, gate)
        init_tokenizer_manager_func = staticmethod(
            partial(init_tokenizer_manager, TokenizerManagerClass=make_tokenizer_manager_class())
        )

        @classmethod
        def _launch_scheduler_processes(cls, *args: object, **kwargs: object) -> tuple[object, list[BaseProcess]]:
            before_launch(_find_load_snapshot(*args, **kwargs))
            with forking_schedulers() if forks else nullcontext():
                result, processes = super()._launch_scheduler_processes(*args, **kwargs)
            on_launch(processes)
            return result, processes

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: object) -> tuple[list[BaseProcess], list[str]]:
            return [], []  # the schedulers send token ids directly to the tokenizer manager

    return HostedEngine


@contextmanager
def temporary_files_in(directory: str) -> Iterator[None]:
    """Create temporary files, such as SGLang's sockets, in `directory` within the block."""
    before, tempfile.tempdir = tempfile.tempdir, directory
    try:
        yield
    finally:
        tempfile.tempdir = before


def _find_load_snapshot(server_args: ServerArgs, port_args: PortArgs, *_: object, **__: object) -> Path:
    from sglang.srt.managers.load_snapshot import shm_path_for

    return Path(shm_path_for(port_args.instance_id))
