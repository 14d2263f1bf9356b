"""Run the corpus: `python -m tests.sandbox.corpus --tier all`. Exit code 0 if all programs are contained."""

from __future__ import annotations

import argparse
import sys

from megarl.sandbox.fork_server_client import ForkServer
from megarl.sandbox.tiers import LOCAL_TIERS, find_local_tiers
from tests.sandbox.corpus.check import ATTACKS, can_run_outside, check_tier, find_fault_outside
from tests.sandbox.corpus.targets import open_targets


def out(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the corpus and print a line for each kind of sandbox."""
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox.corpus")
    parser.add_argument("--tier", choices=[*LOCAL_TIERS, "all", "outside"], default="all")
    parser.add_argument("--only", help="name of one program")
    args = parser.parse_args()
    attacks = [attack for attack in ATTACKS if args.only in (None, attack.name)]
    found = find_local_tiers()
    tiers = [tier for tier in LOCAL_TIERS if args.tier in (tier, "all")]
    failed = False
    num_run = 0
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
            out(
                f"{tier}: {len(report.contained)} of {len(attacks)} programs contained, {report.forgeries} forgeries, "
                f"{len(report.failures)} failures, {report.seconds:.1f} s, at most {report.longest_seconds:+.2f} s "
                "from the time limit"
            )
            for failure in report.failures:
                out(f"  {failure}")
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
