"""What weight sync costs each process of a run with thousands of ranks, measured on one machine without GPUs.

    python -m benchmarks.reshard.scale --train pp=16,tp=8,ep=64 --ranks 2048 --gen tp=32 --engine-ranks 1024 --json

Processes are faked, the code is the product's: the controller's `WeightSync` calls actors that only serialize their
arguments (as Ray does) and answer; a sample of ranks really deserializes what was sent, exchanges layouts, plans, and
executes its plan on tensors without memory. One JSON object is printed for each arrangement: `colocated` (engines on
the slots of the first trainer ranks) and `disaggregated` (engines on machines of their own).

Seconds are CPU seconds, MB are 10**6 bytes; figures per rank are the worst of the sample. Fields:

    connect_cpu_seconds_per_rank   from the controller's first message to the plan
    connect_host_mb_per_rank       growth of anonymous memory by what is kept after that; connect_peak_mb_per_rank: peak
    connect_message_mb_per_rank    all that is sent to a rank for it: by the controller, and by the other ranks' layouts
    controller_connect_cpu_seconds `WeightSync()`: serialization of all arguments, deserialization of all answers
    sync_cpu_seconds_per_rank      one execution of the plan, without torch.distributed's own calls, kernels and copies
    engine_host_serial_seconds     what the one process that hosts an engine spends in a sync for all its TP ranks
    engine_rank_connect_cpu_seconds, _sync_cpu_seconds
                                   what a TP rank of a colocated engine spends on its boxes, without kernels and copies
    controller_sync_cpu_seconds    `WeightSync.push`, without a comparison of weights (`weight_sync.verify: null`)
    ray_calls_connect, _sync       calls of actors and of ray.put, whose own time is not part of the controller's
    fan_outs_connect, _sync        how often the controller calls ranks or engines and waits for all of them
    groups, p2p_calls              the most groups that a rank posts in a sync, and messages that it sends and receives
    buffer_buckets                 the most memory of a rank's buffers in a sync, over `weight_sync.bucket_bytes`
    peers_outside_machine_max      ranks on other machines that a rank has messages with
    egress_ratio_64_to_8_machines  Qwen3-8B from 16 trainer ranks: bytes sent by the busiest of them to 64 machines of
                                   engines, over those to 8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import get_args

from benchmarks.reshard.scale_controller import MODELS, ArrangementName, FakeController, ScaleCase, make_case
from benchmarks.reshard.scale_engine import host_cpu_seconds
from benchmarks.reshard.scale_rank import MB, in_child
from megarl.reshard.planning.disaggregated import TransferSpec


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """The figures of one arrangement, as printed; see the module for their meaning."""

    arrangement: str
    trainer_ranks: int
    engine_ranks: int
    sampled_ranks: int
    connect_cpu_seconds_per_rank: float
    connect_host_mb_per_rank: float
    connect_peak_mb_per_rank: float
    connect_message_mb_per_rank: float
    controller_connect_cpu_seconds: float
    ray_calls_connect: int
    fan_outs_connect: int
    sync_cpu_seconds_per_rank: float
    engine_host_serial_seconds: float
    engine_rank_connect_cpu_seconds: float
    engine_rank_sync_cpu_seconds: float
    controller_sync_cpu_seconds: float
    ray_calls_sync: int
    fan_outs_sync: int
    groups: int
    p2p_calls: int
    buffer_buckets: float
    peers_outside_machine_max: int
    egress_ratio_64_to_8_machines: float


def measure(case: ScaleCase, sample: int, report: Callable[[str], None] = lambda _: None) -> ScaleReport:
    """Measure a case on `sample` ranks of each side; `report` receives progress lines."""
    controller = FakeController(case)
    figures = controller.measure()
    places = [case.grid.coordinates(rank) for rank in range(len(case.sources))]
    first = {(place.pp, place.tp): rank for rank, place in reversed(list(enumerate(places)))}
    chosen = _spread(sorted(first.values()), sample)
    gathered = sum(map(len, controller.gathered))
    messages = [controller.rank_request(rank)[1] + gathered for rank in chosen]
    costs = []
    for rank in chosen:
        costs.append(in_child(partial(controller.measure_trainer_rank, rank)))
        report(f"{case.arrangement}: trainer rank {rank}: {costs[-1]}")
    tp = len(case.needs.layouts)
    if case.is_disaggregated:
        with controller.ray.installed():
            file = controller.spec_file()
        messages.append(len(file))
        engine_ranks = [(i % case.num_engines, tp_rank) for i, tp_rank in enumerate(_spread(range(tp), sample))]
        for engine, tp_rank in engine_ranks:
            costs.append(in_child(partial(controller.measure_engine_rank, file, engine, tp_rank)))
            report(f"{case.arrangement}: TP rank {tp_rank} of engine {engine}: {costs[-1]}")
    return ScaleReport(
        arrangement=case.arrangement,
        trainer_ranks=len(case.sources),
        engine_ranks=case.engine_ranks,
        sampled_ranks=len(costs),
        connect_cpu_seconds_per_rank=max(cost.connect_cpu_seconds for cost in costs),
        connect_host_mb_per_rank=max(cost.connect_host_mb for cost in costs),
        connect_peak_mb_per_rank=max(cost.connect_peak_mb for cost in costs),
        connect_message_mb_per_rank=max(messages) / MB,
        sync_cpu_seconds_per_rank=max(cost.sync_cpu_seconds for cost in costs),
        engine_host_serial_seconds=in_child(partial(host_cpu_seconds, tp)),
        engine_rank_connect_cpu_seconds=max(cost.engine_rank_connect_cpu_seconds for cost in costs),
        engine_rank_sync_cpu_seconds=max(cost.engine_rank_sync_cpu_seconds for cost in costs),
        groups=max(cost.groups for cost in costs),
        p2p_calls=max(cost.p2p_calls for cost in costs),
        buffer_buckets=max(cost.buffer_bytes for cost in costs) / case.config.bucket_bytes,
        peers_outside_machine_max=max(cost.peers_outside_machine for cost in costs),
        egress_ratio_64_to_8_machines=egress_ratio(),
        **figures,
    )


def _spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the items, evenly spread."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def egress_ratio() -> float:
    """Return the bytes of the busiest sender to 64 engine machines over those to 8."""
    few, many = (in_child(partial(busiest_sender_bytes, machines)) for machines in (8, 64))
    return many / few


def busiest_sender_bytes(machines: int) -> int:
    """Return the bytes that the busiest of 16 trainer ranks sends to engines of tp 8 on `machines` machines."""
    case = make_case(
        "qwen3-8b", "tp=8", "tp=8", ranks=16, engine_ranks=8 * machines, arrangement="disaggregated", machine=8
    )
    number: dict[str, int] = {}
    spec = TransferSpec(
        sources=case.sources,
        needs=case.needs.layouts,
        num_engines=case.num_engines,
        nodes=tuple(number.setdefault(machine, len(number)) for machine in case.machines),
        bucket_bytes=case.config.bucket_bytes,
    )
    plans = (spec.plan(rank) for rank in range(len(case.sources)))
    return max(sum(hop.bytes_sent for this in plan.rounds for hop in this.hops) for plan in plans)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of each arrangement."""
    args = _parser().parse_args(arguments)
    for arrangement in args.arrangement:
        case = make_case(
            args.model,
            args.train,
            args.gen,
            ranks=args.ranks,
            engine_ranks=args.engine_ranks,
            arrangement=arrangement,
            machine=args.ranks_per_machine,
        )
        found = asdict(measure(case, args.sample, lambda line: print(line, file=sys.stderr, flush=True)))
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
        if args.json:
            print(json.dumps(rounded), flush=True)
        else:
            print("\n".join(f"{name:32} {value}" for name, value in rounded.items()), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.reshard.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3", help="in its published size")
    train = "pp=16,tp=8,ep=64"
    parser.add_argument("--train", default=train, metavar=train, help="dp follows from --ranks")
    parser.add_argument("--ranks", type=int, default=2048, help="trainer ranks")
    parser.add_argument("--gen", default="tp=32", metavar="tp=32")
    parser.add_argument("--engine-ranks", type=int, default=1024, help="ranks of all engines")
    parser.add_argument("--ranks-per-machine", type=int, default=8)
    arrangements = get_args(ArrangementName)
    parser.add_argument("--arrangement", nargs="+", choices=arrangements, default=arrangements)
    parser.add_argument(
        "--sample",
        type=int,
        default=8,
        help="ranks of each side to measure, spread over the pipeline stages and tensor-parallel indices; one rank of "
        "each, which is 128 in the default case, takes about ten minutes for each arrangement",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
