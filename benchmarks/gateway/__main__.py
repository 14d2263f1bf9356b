"""Measures the time that the gateway adds to a turn, and the memory of its sessions, with an engine that only waits.

python -m benchmarks.gateway --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from benchmarks.gateway.measure import Load, measure


def main() -> int:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64, help="sessions at the same time, for latencies")
    parser.add_argument("--many", type=int, default=1000, help="sessions at the same time, for memory")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--engine-seconds", type=float, default=1.0, help="time that the engine takes for a turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    loads = {
        "latency": Load(num_sessions=args.sessions, num_turns=args.turns, engine_seconds=args.engine_seconds),
        "memory": Load(num_sessions=args.many, num_turns=args.turns, engine_seconds=args.engine_seconds),
    }
    started = time.perf_counter()
    results: dict[str, Any] = {name: asyncio.run(measure(load)) for name, load in loads.items()}
    results["seconds"] = time.perf_counter() - started
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    latency, memory = results["latency"], results["memory"]
    print(
        f"{args.sessions} sessions of {args.turns} turns: added to a turn p50 {latency['added_ms_p50']:.2f} ms, "
        f"p99 {latency['added_ms_p99']:.2f} ms; {latency['cpu_ms_per_turn']:.2f} ms CPU a turn\n"
        f"{args.many} sessions: {memory['rss_growth_mib']:.0f} MiB more memory"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
