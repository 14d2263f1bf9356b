"""Keeps a paused scheduler of a CPU engine from using the core that the weight update needs.

SGLang's scheduler sleeps until a message comes while it has no requests, but not while generation is paused: it then
polls its sockets without a break. On CPUs it competes for cores with the trainer ranks that send the weights.
"""

from __future__ import annotations

import torch


def idle_on_cpu() -> None:
    """Let schedulers in this process sleep during pauses, and flush without a garbage collection; no-op on CUDA."""
    if torch.cuda.is_available():
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.platforms.cpu import CpuDeviceMixin

    record_state = Scheduler._record_scheduler_state_for_paused_engine

    def record_state_and_sleep(scheduler: Scheduler) -> None:
        record_state(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_state_and_sleep
    # it collects garbage in every flush, and so in every weight update; Python collects it anyway
    CpuDeviceMixin.empty_cache = lambda _: None
