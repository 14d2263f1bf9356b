"""Formats a report as a table for the terminal or a Markdown file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.report import ChaosReport


def rows(report: ChaosReport) -> list[tuple[str, str]]:
    """Return the (name, value) rows of the table."""
    made = f"{report.kills} of {report.kills_asked}" if report.kills < report.kills_asked else str(report.kills)
    return [
        ("kills", made),
        *((f"  of {_words(target)}", str(count)) for target, count in report.by_target.items()),
        *((f"  in {_words(phase)}", str(count)) for phase, count in report.by_phase.items()),
        ("recovered", str(report.recovered)),
        ("recovery, median", _seconds(report.recovery_seconds_p50)),
        *(
            (f"  of {_words(target)}", _seconds(seconds))
            for target, seconds in report.recovery_seconds_by_target.items()
        ),
        ("recovery, longest", _seconds(report.recovery_seconds_max)),
        ("restarts of the command", str(report.restarts)),
        ("bitwise equal", "yes" if report.bitwise_equal else "no"),
        ("prompts lost", str(report.prompts_lost)),
        ("prompts repeated", str(report.prompts_repeated)),
        ("trajectories repeated", str(report.trajectories_repeated)),
        ("orphans", str(report.orphans)),
        (f"{report.steps} steps, undisturbed", _seconds(report.seconds_undisturbed)),
        (f"{report.steps} steps, disturbed", _seconds(report.seconds_disturbed)),
    ]


def print_table(report: ChaosReport) -> None:
    """Print the table to stdout, followed by differences and orphans."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows(report):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for line in (*report.differences, *report.orphan_names):
        console.print(line, markup=False, soft_wrap=True)


def markdown(report: ChaosReport) -> str:
    """Return the table in Markdown."""
    lines = [("", ""), ("---", "---:"), *rows(report)]
    return "\n".join(f"| {name} | {value} |" for name, value in lines) + "\n"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
