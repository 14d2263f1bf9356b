"""Run the corpus: `python -m tests.sandbox.corpus --tier all`. Exit code 0 if all programs are contained.

Each program needs to end in time, which a machine that does something else at the same time can prevent.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from megarl.sandbox.guest.channel import MIB
from megarl.sandbox.session import ForkServer
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers
from tests.sandbox.corpus.attacks import ATTACKS
from tests.sandbox.corpus.check import MAX_GROWTH, MAX_OVERRUN, Report, can_run_outside, check_tier, find_fault_outside
from tests.sandbox.corpus.forgeries import FORGERIES
from tests.sandbox.corpus.targets import open_targets

out = partial(print, flush=True)


COLUMNS = ("tier", "contained", "secrets", "forgeries refused", "after limit", "host memory", "failures", "time")
TARGETS = ("target", "all", "0", "all", f"<= {MAX_OVERRUN} s", f"<= {MAX_GROWTH / MIB:.0f} MiB", "0", "")


def row(report: Report, num_attacks: int) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        report.tier,
        f"{len(report.contained)} of {num_attacks - len(report.exempt)}",
        str(report.leaks),
        f"{report.refused} of {len(FORGERIES)}",
        f"{report.overrun:+.2f} s",
        f"{report.growth / MIB:+.1f} MiB",
        str(len(report.failures)),
        f"{report.seconds:.1f} s",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the text of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def main() -> int:
    """Run the corpus, print what is not contained, and a table with a row for each kind of sandbox."""
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox.corpus")
    parser.add_argument("--tier", choices=[*LOCAL_TIERS, "all", "outside"], default="all")
    parser.add_argument("--only", help="name of one program")
    args = parser.parse_args()
    attacks = [attack for attack in ATTACKS if args.only in (None, attack.name)]
    found = find_local_tiers()
    tiers = [tier for tier in LOCAL_TIERS if args.tier in (tier, "all")]
    failed = False
    num_run, rows = 0, list[tuple[str, ...]]()
    with open_targets() as targets:
        for tier in tiers:
            if found[tier] is not None:
                out(f"{tier}: not on this machine: {found[tier]}")
                failed = failed or args.tier == tier
                continue
            server = ForkServer()
            report = check_tier(tier, targets, server, attacks)
            server.close()
            num_run += 1
            failed = failed or bool(report.failures)
            rows.append(row(report, len(attacks)))
            exempt = [f"without {name}: {reason}" for name, reason in report.exempt.items()]
            for line in (*exempt, *report.failures):
                out(f"{tier}: {line}")
        if num_run:
            out(table([COLUMNS, *rows, TARGETS]))
        if args.tier == "outside":
            num_run = 1
            for attack in attacks:
                if can_run_outside(attack):
                    fault = find_fault_outside(attack, targets)
                    failed = failed or fault is not None
                    out(f"{attack.name} without a sandbox: {'works' if fault is None else f'DOES NOT WORK: {fault}'}")
    if num_run == 0:
        out("the corpus ran in no sandbox")
    return 1 if failed or num_run == 0 else 0


sys.exit(main())
