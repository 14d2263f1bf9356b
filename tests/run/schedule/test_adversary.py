"""Adversarial schedules: none trains a token above the cap, none gets stuck, no group is lost or doubled."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from random import Random

import pytest
from pydantic import TypeAdapter

from megarl.run.schedule.events import (
    Admitted,
    Leased,
    Outcome,
    ScheduleState,
    TokenVersions,
    decode_event,
    encode_event,
    recover,
)
from megarl.run.schedule.schedule import Schedule
from megarl.run.schedule.settings import Late, SchedulePolicy, Update

STATES = TypeAdapter(ScheduleState)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of one run against the adversary."""

    policy: SchedulePolicy
    groups_per_step: int
    num_steps: int
    p_slow: float  # share of groups that finish only when nothing else can happen
    p_removed: float  # share of groups that are filtered or fail
    p_kill: float  # probability of a kill before an action; each loses the end of the log and some finished groups
    trainer_weight: float  # how often the trainer acts when the engines could, too
    newest_first: bool  # and an adapted lookahead takes waits into account
    checkpoint_every: int
    changes_policy: bool  # resumed runs may have another lookahead and cap


class Run:
    """What happened, by accounts that do not read the schedule's; groups by their ordinals."""

    def __init__(self, case, random):
        self.case, self.random = case, random
        self.schedule = Schedule(case.policy, case.groups_per_step, num_steps=case.num_steps)
        self.batches = []  # trained, in the order of the steps
        self.removed = {}  # ordinal -> number of the event
        self.excess = -1_000  # largest staleness of a trained token, less the cap at that time
        self.num_kills = self.num_lost = 0  # lost: finished groups whose trajectories were lost in a kill
        self.stuck, self.log, self.checkpoint = False, [], ScheduleState()
        self.in_flight, self.slow = {}, {}  # ordinal -> version that samples its first token; slow: those held back
        self.on_disk = {}  # ordinal -> versions of its tokens
        self.expected = []  # batches that have to be trained on next, as logged

    def finish(self):
        """Run all steps, unless nothing can happen any more."""
        case, random = self.case, self.random
        while self.schedule.version < case.num_steps and not self.stuck:
            if case.p_kill and random.random() < case.p_kill:
                self.kill()
            self.act()
        return self

    def act(self):
        """Take one action of those that are possible; slow groups finish last."""
        schedule, random = self.schedule, self.random
        if self.case.newest_first and schedule.leased is None and schedule.pick() is None:
            schedule.mark_waiting()
        if self.in_flight and random.random() >= self.case.trainer_weight:
            self.finish_group(self.in_flight)
        elif schedule.capacity and random.random() < 0.7:
            self.admit(random.randint(1, schedule.capacity))
        elif schedule.can_push:
            self.push()
        elif (batch := schedule.pick()) is not None:
            self.lease(batch)
        elif self.in_flight:
            self.finish_group(self.in_flight)
        elif schedule.capacity:
            self.admit(schedule.capacity)
        elif self.slow:
            self.finish_group(self.slow)
        else:
            self.stuck = True

    def admit(self, num):
        event = self.schedule.admit(num)
        self.log.append(event)
        for ordinal in event.ordinals:
            assert ordinal not in self.in_flight
            assert ordinal not in self.slow
            self.on_disk.pop(ordinal, None)
            held = self.slow if self.random.random() < self.case.p_slow else self.in_flight
            held[ordinal] = self.schedule.version

    def finish_group(self, groups):
        random = self.random
        ordinal = max(groups) if self.case.newest_first else random.choice(list(groups))
        oldest, newest = groups.pop(ordinal), self.schedule.version
        if self.case.p_removed and random.random() < self.case.p_removed:
            if random.random() < 0.5:  # filtered once it has finished
                self.log.append(self.schedule.finish(ordinal, oldest=oldest, newest=newest))
            event = self.schedule.remove(ordinal, random.choice([Outcome.FILTERED, Outcome.FAILED]))
            self.log.append(event)
            self.removed[ordinal] = event.number
            return
        self.on_disk[ordinal] = TokenVersions(oldest, newest)
        self.log.append(self.schedule.finish(ordinal, oldest=oldest, newest=newest))

    def lease(self, batch):
        step, policy = self.schedule.step, self.schedule.policy
        self.log.append(self.schedule.lease(batch))
        if self.expected:
            assert batch == self.expected.pop(0)
        else:
            oldest = min(self.on_disk[ordinal].oldest for ordinal in batch)
            self.excess = max(self.excess, step - 1 - oldest - policy.max_staleness)
        assert max(self.on_disk[ordinal].newest for ordinal in batch) < step
        is_one_step_off = policy.in_order and policy.update is Update.DRAIN and policy.lookahead <= 1
        if is_one_step_off and not (self.case.p_removed or self.case.changes_policy or self.num_lost):
            size = self.case.groups_per_step
            assert batch == tuple(range((step - 1) * size, step * size))
        self.batches.append(batch)

    def push(self):
        event = self.schedule.push()
        self.log.append(event)
        for ordinal in event.dropped:
            self.in_flight.pop(ordinal, None)
            self.slow.pop(ordinal, None)
            self.removed[ordinal] = event.number
        if self.schedule.version % self.case.checkpoint_every == 0:
            self.checkpoint = self.schedule.state()

    def kill(self):
        """Resume from the checkpoint and what is left of the log and of the finished groups."""
        random = self.random
        self.num_kills += 1
        if random.random() < 0.5:
            survives = len(self.log) - random.randint(0, 4)
            first = next((i for i, e in enumerate(self.log) if e.number > self.checkpoint.num_events), len(self.log))
            self.log = self.log[: max(first, survives)]
        if self.on_disk and random.random() < 0.2:
            del self.on_disk[random.choice(list(self.on_disk))]
            self.num_lost += 1
        known_to_log = self._known_to_log()
        self.on_disk = {ordinal: v for ordinal, v in self.on_disk.items() if ordinal in known_to_log}
        last = max(self.checkpoint.num_events, self.log[-1].number if self.log else 0)
        self.removed = {ordinal: number for ordinal, number in self.removed.items() if number <= last}
        log, state = self.log, self.checkpoint
        if random.random() < 0.1:
            log = [decode_event(json.loads(json.dumps(encode_event(event)))) for event in log]
            state = STATES.validate_json(json.dumps(asdict(state)))
            assert (log, state) == (self.log, self.checkpoint)
        state = recover(state, log, self.on_disk)
        self.batches = self.batches[: state.version]
        self.expected = [lease.ordinals for lease in state.leases]
        self._check_replayed(state)
        policy = self.schedule.policy
        if self.case.changes_policy and random.random() < 0.3:
            staleness = random.randint(0, 3)
            policy = replace(policy, lookahead=random.randint(0, staleness), max_staleness=staleness)
        self.schedule = Schedule(policy, self.case.groups_per_step, num_steps=self.case.num_steps, state=state)
        self.log.append(self.schedule.resume())
        self.in_flight, self.slow = {}, {}

    def _known_to_log(self):
        """Ordinals whose last admission is in the checkpoint or in what is left of the log."""
        known = {group.ordinal for group in self.checkpoint.groups}
        known |= {ordinal for lease in self.checkpoint.leases for ordinal in lease.ordinals}
        return known.union(*(event.ordinals for event in self.log if isinstance(event, Admitted)))

    def _check_replayed(self, state):
        """Batches in the log are trained again as logged, up to the first one with a group that cannot be read."""
        logged = {event.step: event.ordinals for event in self.log if isinstance(event, Leased)}
        logged = {step: ordinals for step, ordinals in logged.items() if step > state.version}
        for step in sorted(logged):
            if not all(ordinal in self.on_disk for ordinal in logged[step]):
                break
            position = step - state.version - 1
            if position < len(self.expected):
                assert self.expected[position] == logged[step]

    def lost_or_doubled(self):
        """Return the ordinals that were admitted, and were not either trained on once or removed."""
        ends = [ordinal for batch in self.batches for ordinal in batch] + list(self.removed)
        return [ordinal for ordinal in range(self.schedule.state().next_ordinal) if ends.count(ordinal) != 1]


def random_case(random):
    """Return a random case."""
    max_staleness = random.choice([0, 1, 1, 2, 2, 3])
    lookahead = max_staleness if random.random() < 0.5 else random.randint(0, max_staleness)
    in_order = random.random() < 0.1
    return Case(
        policy=SchedulePolicy(
            lookahead=lookahead,
            max_staleness=max_staleness,
            update=Update.DRAIN if in_order or random.random() < 0.1 else Update.RETRACT,
            in_order=in_order,
            adapt_lookahead=not in_order and random.random() < 0.5,
        ),
        groups_per_step=random.choice([1, 2, 3]),
        num_steps=random.randint(4, 8),
        p_slow=random.choice([0.1, 0.2, 0.3]),
        p_removed=random.choice([0.0, 0.0, 0.2]),
        p_kill=random.choice([0.0, 0.0, 0.02, 0.1]),
        trainer_weight=random.choice([0.2, 0.5, 0.9]),
        newest_first=random.random() < 0.3,
        checkpoint_every=random.choice([1, 2, 3]),
        changes_policy=random.random() < 0.3,
    )


NUM_CASES, NUM_SLOW_CASES = 4_000, 20_000
NUM_CONTROL_CASES = 1_000


def run_cases(seeds, late=None):
    """Yield seed, case and run of random cases, with `late` instead of their own rule for late groups."""
    for seed in seeds:
        random = Random(seed)
        case = random_case(random)
        if late is not None:
            case = replace(case, policy=replace(case.policy, late=late, in_order=False))
        result = Run(case, random).finish()
        assert not result.stuck, (seed, case)
        assert result.lost_or_doubled() == [], (seed, case)
        yield seed, case, result


@pytest.mark.parametrize(
    "seeds", [range(NUM_CASES), pytest.param(range(NUM_CASES, NUM_SLOW_CASES), marks=pytest.mark.slow)], ids=str
)
def test_no_token_is_above_the_cap_and_no_group_is_lost(seeds):
    seen = Counter()
    for seed, case, result in run_cases(seeds):
        assert result.excess <= 0, (seed, case)
        seen["kills"] += result.num_kills
        seen["removed"] += len(result.removed)
        seen["at the cap"] += result.excess == 0 < case.policy.max_staleness
        seen["adapted"] += case.policy.adapt_lookahead and case.policy.lookahead > 0
    assert min(seen.values()) > len(seeds) / 5, seen  # the cases are no easy ones


def test_the_gate_alone_exceeds_the_cap():
    """With `late: mask`, a step never waits for the deadline rule; nothing else differs."""
    above = sum(result.excess > 0 for _, _, result in run_cases(range(NUM_CONTROL_CASES), Late.MASK))
    assert above >= 0.3 * NUM_CONTROL_CASES


def test_dropped_groups_are_replaced_and_none_is_above_the_cap():
    dropped = 0
    for seed, case, result in run_cases(range(NUM_CONTROL_CASES), Late.DROP):
        assert result.excess <= 0, (seed, case)
        dropped += result.schedule.state().counts.dropped
    assert dropped > NUM_CONTROL_CASES / 10
