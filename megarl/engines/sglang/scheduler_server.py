"""The process from which the schedulers of a CPU engine are forked, and which imports SGLang once for all of them.

engine host     |- imports SGLang -|- arguments -|- front end ...
fork server     |- imports SGLang -|- waits ------------------------
scheduler                                        '- fork: loads the model

A spawned scheduler would begin to import SGLang only after the host has. The server forks before it has threads and
never uses CUDA; on GPUs schedulers are spawned, because SGLang sets variables that must exist before their start.

multiprocessing imports this module in the server. The server dies with the thread of the host that started it, and the
schedulers die with the server.
"""

from __future__ import annotations

import gc
import os
import signal

from megarl.cluster.process.child_processes import set_parent_death_signal
from megarl.cluster.process.process_start import fast_imports
from megarl.engines.sglang import scheduler_process

host = int(os.environ[scheduler_process.HOST_VARIABLE])
set_parent_death_signal(signal.SIGKILL, parent=host)  # before the imports, which take seconds

with fast_imports():
    import torch

    # PyPI's build is one for CUDA, by which SGLang would choose NCCL for the ranks of an engine
    torch.version.cuda = None

    import sglang.srt.managers.scheduler  # noqa: F401 -- imported for the schedulers

    from megarl.engines.sglang.cpu import batching, determinism  # noqa: F401

scheduler_process.ignore_sigquit()  # a failing scheduler sends it to its parent
scheduler_process.mark_as_fork_server()
gc.freeze()  # a garbage collection in a scheduler would otherwise copy the pages that it shares with the server
