"""Measures the time that the gateway adds to a turn, and the memory of its sessions, with an engine that only waits.

python -m benchmarks.gateway --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway.measure import Load, measure, measure_http
from benchmarks.results_file import write_results
from benchmarks.text_table import markdown_rows, print_rows

COLUMNS = {
    "num_sessions": "sessions",
    "engine_seconds": "engine s",
    "added_ms_p50": "added p50 ms",
    "added_ms_p99": "added p99 ms",
    "cpu_ms_per_turn": "CPU ms a turn",
    "rss_growth_mib": "memory MiB",
}

INTRODUCTION = """# Turns through the gateway

```
{command}
```

On {cores} cores. An engine answers each turn with {tokens} tokens after a time in which it computes nothing; a client
in another process talks in all sessions at once, {turns} turns in each. *Added*: how much longer a turn takes for the
client than for the engine, turn by turn. *CPU* and *memory*: of the process with the gateway. `HTTP alone` is the
same client with a server that parses each request and answers with the same text: aiohttp, without a conversation.
Targets: 3 ms added for half of the turns and 10 ms for 99 of 100, and 300 MB for {many} sessions.

"""


def main() -> int:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64, help="sessions at the same time, for latencies")
    parser.add_argument("--many", type=int, default=1000, help="sessions at the same time, for memory")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument(
        "--engine-seconds",
        type=float,
        default=1.0,
        help="time that the engine takes for a turn of few sessions; for many it takes longer by their number",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a table in Markdown")
    args = parser.parse_args()
    few, many = (
        Load(
            num_sessions=count, num_turns=args.turns, engine_seconds=args.engine_seconds * max(1, count / args.sessions)
        )
        for count in (args.sessions, args.many)
    )
    started = time.perf_counter()
    results: dict[str, Any] = {
        "latency": asyncio.run(measure(few)),
        "memory": asyncio.run(measure(many)),
        "http_latency": asyncio.run(measure_http(few)),
        "http_memory": asyncio.run(measure_http(many)),
    }
    rows = []
    for name, result in results.items():
        numbers = [f"{result[key]:.1f}" if isinstance(result[key], float) else str(result[key]) for key in COLUMNS]
        rows.append(["HTTP alone" if name.startswith("http") else "gateway", *numbers])
    results["seconds"] = time.perf_counter() - started
    columns = ["", *COLUMNS.values()]
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print_rows(columns, rows, num_text_columns=1)
    if args.write is not None:
        write_results(
            args.write,
            INTRODUCTION,
            markdown_rows(columns, rows, num_text_columns=1),
            module="benchmarks.gateway",
            tokens=few.reply_tokens,
            turns=few.num_turns,
            many=many.num_sessions,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
