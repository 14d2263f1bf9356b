"""`megarl reshard explain`: compute the cost of weight sync with each strategy, without transferring anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megarl.cli.options import add_family, console, home_path, print_error
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.reshard.analysis.sync_report import Explanation

STRATEGIES = ("gather_hf", "micro_dp", "exact", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `explain --model M --train pp=1,tp=4,dp=2 --gen tp=2`, and its options."""
    actions = parser.add_subparsers(metavar="ACTION", title="actions", required=True)
    summary = "compute bytes, memory and messages of every strategy from the weight layouts"
    explain = actions.add_parser("explain", help=summary, description=summary[0].upper() + summary[1:] + ".")
    explain.add_argument(
        "--model",
        required=True,
        type=home_path,
        help="model folder, config.json or hub id; weights are not needed",
    )
    add_family(explain)
    explain.add_argument(
        "--train",
        required=True,
        metavar="pp=1,tp=4,dp=2",
        help="parallel sizes of the trainer, also cp, vpp, ep, etp; default 1, of etp tp",
    )
    explain.add_argument("--gen", required=True, metavar="tp=2", help="parallel sizes of one engine, also ep and dp")
    for which in ("first", "last"):
        text = f"layers of the trainer's {which} pipeline stage (default: as many as the other stages)"
        explain.add_argument(f"--{which}-stage-layers", type=int, metavar="N", help=text)
    explain.add_argument("--nodes", type=int, default=1, help="number of nodes, with equally many ranks each (1)")
    explain.add_argument("--bucket-mb", type=float, default=256, help="weight_sync.bucket_bytes in MiB (256)")
    rates = explain.add_argument_group("rates of links, for sending and for receiving each")
    text = "10^9 bytes per second of one NIC (50)"
    rates.add_argument("--network-gb-per-second", type=float, default=50, metavar="GB", help=text)
    text = "10^9 bytes per second between one rank and the others of its node (400)"
    rates.add_argument("--nvlink-gb-per-second", type=float, default=400, metavar="GB", help=text)
    text = "NICs of a node, which its ranks share evenly (default: one for each rank)"
    rates.add_argument("--nics-per-machine", type=int, metavar="N", help=text)
    explain.add_argument("--strategy", nargs="+", choices=STRATEGIES, help="strategies to explain (default: all)")
    explain.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Print one row per strategy.

    A strategy that does not support the sizes is left out with a message on stderr; if --strategy names it, it is an
    error.
    """
    if args.bucket_mb <= 0:
        raise ConfigError(f"--bucket-mb needs to be positive, got {args.bucket_mb:g}")
    from megarl.cli.tools.reshard_explain import explain_scenarios, link_rates, require_even_nics, trace_scenario

    rates = link_rates(
        network_gb_per_second=args.network_gb_per_second,
        nvlink_gb_per_second=args.nvlink_gb_per_second,
        nics_per_machine=args.nics_per_machine,
    )

    with _show_progress() as show_phase:
        show_phase("computing the layouts of trainer and engines")
        scenario = trace_scenario(
            args.model,
            family=args.family,
            train=args.train,
            gen=args.gen,
            nodes=args.nodes,
            bucket_bytes=int(args.bucket_mb * 2**20),
            first_stage_layers=args.first_stage_layers,
            last_stage_layers=args.last_stage_layers,
        )
        require_even_nics(rates, scenario.topology)
        explained, refused = explain_scenarios(scenario, args.strategy or STRATEGIES, show_phase, rates)
    for name, why in refused.items():
        if args.strategy:
            raise why
        print_error(f"{name} left out: {why}")
    if args.json:
        for name, each in explained.items():
            print(json.dumps(each.as_json() | {"strategy": name, "resolved": each.report.strategy}), flush=True)
    else:
        _print_table(list(explained.items()))
    return 0


@contextmanager
def _show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current phase on stderr: a status line on a terminal, else one line per phase."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console(stderr=True).status("") as status:
        yield status.update


def _print_table(explained: Sequence[tuple[str, Explanation]]) -> None:
    from rich.table import Table

    first = explained[0][1]
    report = first.report
    out = console()
    out.print(
        f"{report.model}, {first.model_bytes / 1e6:,.1f} MB, {report.world} ranks, {report.train} -> {report.gen}; "
        "MB = 10^6 bytes"
    )
    headings = ["strategy", "MB total", "in max", "in mean", "in bound", "of model", "cross node", "node max"]
    headings += ["node bound", "peak extra", "messages", "NCCL", "plan s", "cached s"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, each in explained:
        table.add_row(name if name == each.report.strategy else f"{name}: {each.report.strategy}", *_format_cells(each))
    out.print(table)
    _print_times(explained)
    for name, each in explained:
        if each.machines_per_tensor_group > 1:
            machines = each.machines_per_tensor_group
            out.print(
                f"{name}: tensor-parallel ranks of an engine are on {machines} nodes; only engines with a pool of "
                "their own (placement.rollout.pool) may span nodes"
            )
        if each.stalls:
            more = f" (and {len(each.stalls) - 1} more)" if len(each.stalls) > 1 else ""
            out.print(f"{name}: the sync would hang over NCCL: {each.stalls[0]}{more}")
        if each.report.messages is None:
            busiest = each.busiest_rank_stats
            out.print(
                f"{name}: values shown as - need the plans of all {each.report.world:,} ranks; rank "
                f"{each.busiest_rank}, which receives the most bytes, has {busiest.messages:,} messages, "
                f"{busiest.collectives:,} collectives and {busiest.peak_extra_bytes / 1e6:,.1f} MB of peak extra memory"
            )


def _print_times(explained: Sequence[tuple[str, Explanation]]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "ms bound", "ms planned", "x bound", "busiest NIC", "NIC share", "groups", "p2p calls"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, each in explained:
        bound, timing = each.seconds_bound, each.timing
        cells = ["-"] * 6
        if timing is not None:
            cells = [
                f"{timing.seconds_planned * 1e3:,.1f}",
                f"{timing.seconds_planned / bound:.2f}" if bound else "-",
                _megabytes(timing.busiest_nic_bytes),
                "-" if timing.nic_share is None else f"{timing.nic_share:.2f}",
                str(timing.groups),
                str(timing.p2p_calls),
            ]
        table.add_row(
            name if name == each.report.strategy else f"{name}: {each.report.strategy}", f"{bound * 1e3:,.1f}", *cells
        )
    out = console()
    out.print()
    out.print(table)


def _format_cells(each: Explanation) -> list[str]:
    r = each.report
    moved = (r.bytes_total, r.bytes_in_max, r.bytes_in_mean, r.bytes_in_bound_max)
    nodes = (r.bytes_cross_node, each.bytes_into_node_max, each.bytes_into_node_bound_max, r.peak_extra_bytes)
    return [
        *map(_megabytes, moved),
        f"{each.fraction_in_max:.4f}",
        *map(_megabytes, nodes),
        "-" if r.messages is None else str(r.messages),
        "-" if each.stalls is None else "stalls" if each.stalls else "ok",
        f"{r.plan_seconds_cold:.3f}",
        f"{r.plan_seconds_cached:.4f}",
    ]


def _megabytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"
