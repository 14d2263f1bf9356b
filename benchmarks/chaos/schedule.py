"""Checks a disturbed asynchronous run, which no undisturbed run repeats: against its replay, and by its own log."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks.chaos.compare import Comparison
from benchmarks.chaos.read import read_metrics
from megarl.config import RunConfig
from megarl.controller.replay import replay_run
from megarl.rollout.journal import journal_folder
from megarl.run.run_logs import log_folder, read_log
from megarl.run.schedule.events import Admitted, Finished, Leased, Pushed, Removed, ScheduleEvent


def is_asynchronous(config: RunConfig) -> bool:
    """Return whether the batches of the run depend on which groups finish first."""
    return config.schedule.type == "async"


def check_schedule(config: RunConfig, disturbed: Path) -> Comparison:
    """Return how a run differs from its replay, and the groups that were lost, trained twice or generated again."""
    with redirect_stdout(sys.stderr):  # its progress; stdout is for the report
        report = replay_run(disturbed, disturbed.with_name("replay"))
    differences = [
        f"checkpoint of step {step}: {len(names)} values differ from the replay, such as {names[0]}"
        for step, names in report.checkpoints.items()
        if names
    ]
    events = list(read_log(log_folder(journal_folder(disturbed))))
    trained = trained_ordinals(events)
    ended = trained.keys() | {event.ordinal for event in events if isinstance(event, Removed)}
    admitted = {ordinal for event in events if isinstance(event, Admitted) for ordinal in event.ordinals}
    cap = config.schedule.resolved().max_staleness
    assert cap is not None
    for step, lines in read_metrics(disturbed).items():
        worst = max((line.get("staleness/max") or 0.0 for line in lines), default=0.0)
        if worst > cap:
            differences.append(f"step {step}: trained on tokens {worst:g} versions old, above the cap of {cap}")
    return Comparison(
        bitwise_equal=not differences,
        prompts_lost=len(admitted - ended),
        prompts_repeated=sum(count - 1 for count in trained.values()),
        trajectories_repeated=num_sampled_again(events),
        differences=differences,
    )


def trained_ordinals(events: list[ScheduleEvent]) -> Counter[int]:
    """Return ordinal -> number of steps that trained on the group; a step that is trained again counts once."""
    batches: dict[int, tuple[int, ...]] = {}
    pushed = {event.version for event in events if isinstance(event, Pushed)}
    for event in events:
        if isinstance(event, Leased) and event.step in pushed:
            batches[event.step] = event.ordinals
    return Counter(ordinal for ordinals in batches.values() for ordinal in ordinals)


def num_sampled_again(events: list[ScheduleEvent]) -> int:
    """Return how many groups were finished and admitted again afterwards."""
    finished: set[int] = set()
    again = 0
    for event in events:
        if isinstance(event, Finished):
            finished.add(event.ordinal)
        elif isinstance(event, Admitted):
            again += len(finished.intersection(event.ordinals))
            finished.difference_update(event.ordinals)
    return again
