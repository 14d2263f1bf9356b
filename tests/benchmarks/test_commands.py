"""Every benchmark runs with its smallest arguments; its JSON and its tables have the promised fields."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megarl.sandbox.tiers import LOCAL_TIERS
from tests.benchmarks import fake_reports

COMMANDS = {
    "gae --tokens=2000 --pairs=2": """kernel loop workload tokens tokens_in_mask sequences longest pairs loop_ms
        vectorised_ms ratio ratio_worst largest_difference""",
    "packing --sequences=12 --ranks=4 --seeds=1 --gsm8k={folder}": """lengths model seed sequences ranks max_tokens
        align scheme micro_batches micro_batches_bound padding_percent fill_percent fullest_percent cost_max_over_mean
        step_cost plan_seconds""",
    "data --rows 1100 --folder={folder}": """rows mb cpu_seconds peak_mb bytes_per_row check_cpu_seconds check_peak_mb
        num_prompts num_stops is_equal""",
    "schedule --simulate --steps=5": """tail schedule steps step_over_bound worst_staleness mean_staleness
        mean_group_staleness wasted_fraction masked_fraction group_steps_mean group_steps_max length_ratio
        open_groups""",
    "staleness --toy --seeds=1 --steps=5 --staleness 0 1": "correction staleness reward reward_min over_fresh",
    "kernels --device=cpu --no-compile --tokens=20 --vocabulary=301": """op workload implementation min_bytes
        counted_bytes flops peak_bytes milliseconds roofline_fraction largest_difference""",
    "kernels.head_traffic --gpu=h200-141 --tokens=4096": "head step flops l2_bytes memory_bytes least_ms",
    "async_agents --folder={folder} --steps=10": """ratio reward_difference steps prompts_per_step group_size
        learning_rate lookahead latency_seconds latency_sigma eval_samples seed runs""",
    "chaos": """kills by_target by_phase recovered bitwise_equal prompts_lost prompts_repeated trajectories_repeated
        recovery_seconds_p50 recovery_seconds_max orphans""",
    "end_to_end --peer=trl --runs=2": "peer runs ratio_toy ratio_long_tail toy long_tail",
    "startup --config=yaml/demo.yaml --runs=3": "config runs median imports",
    "mismatch --folder={folder} --only demo.yaml llama": """name difference dtype steps mismatch entropy stopped_by
        rounding_kl""",
    "gateway --sessions=2 --many=3 --turns=2 --engine-seconds=0.01": "latency memory http_latency http_memory seconds",
    "checkpoint --models=demo --ranks=1 --repeats=1": "model ranks",
    "schedule --events": "open_groups by_deadline_event_us in_order_event_us group_us",
    "reshard.changed_weights --lr=1e-6 --steps=2 --mib=1": "lr step dtype changed_elements pieces entropy codecs",
    "sandbox --runs=1": "results lacking missed",
}
"""Benchmark with its arguments -> the first fields of each JSON object. Runs that take minutes are faked."""
MISSED = ("chaos", "staleness", "sandbox")
"""Benchmarks whose small or fake run may miss a target, which the exit code 1 tells."""


def objects(text: str) -> list[dict[str, Any]]:
    return list(json.loads("[" + text.replace("}\n{", "},{") + "]"))


def call(monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", [f"benchmarks.{module}", *arguments])
    name = f"benchmarks.{module}"
    return int(import_module(name if "." in module else f"{name}.__main__").main())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows in the form of GSM8K, and fakes of all runs that take minutes."""
    rows = [{"question": f"Has {n} pens.", "answer": "No." * n} for n in range(1, 13)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def replace(module: str, **functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(import_module(f"benchmarks.{module}.__main__"), name, function)

    monkeypatch.setattr("benchmarks.schedule.__main__.NUM_OPEN", 100)
    fake, workload = fake_reports, {name: lambda *_: None for name in ("toy", "long_tail")}
    by_schedule = {name: fake.schedule_report(name, seconds, 0.9) for name, seconds in (("sync", 2.0), ("async", 1.0))}
    replace("async_agents", prepare_model=lambda *_: None, run_schedule=lambda _, schedule, __: by_schedule[schedule])
    replace("chaos", _run=lambda *_: fake.chaos_report())
    replace("end_to_end", make_trl_environment=lambda *_: Path("python"), WORKLOADS=workload)
    replace("end_to_end", run_trl=lambda *_, **more: fake.timed_run(1e3 / more["batch_size"]))
    replace("end_to_end", run_megarl=lambda *_: fake.timed_run(2.0))
    sandbox = Mock(cpu_seconds=0.01, **{"receive.return_value": {"value": "[('a', 2)]"}})
    monkeypatch.setattr("benchmarks.sandbox.measure.ForkServer", lambda: Mock(start=lambda *_: sandbox))
    replace("sandbox", find_local_tiers=lambda: dict.fromkeys(LOCAL_TIERS))
    replace("startup", prepare_demo=lambda *_: [], _start_once=lambda *_, **__: (fake.start(20.0), {}))
    replace("mismatch", prepare_folder=lambda *_, **options: None)
    replace("mismatch", run_recipe=lambda recipe, **_: fake.mismatch_report(recipe.file, [1e-6]))
    replace("mismatch", run_family=lambda name, **_: fake.mismatch_report(name, [0.5], rounding_kl=1e-3))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_json_has_the_promised_fields(command, folder, monkeypatch, capsys):
    module, *arguments = command.format(folder=folder).split()
    options = ["--json"] if module != "sandbox" else []
    assert call(monkeypatch, module, [*arguments, *options]) in ((0, 1) if module in MISSED else (0,))
    found, fields = objects(capsys.readouterr().out), COMMANDS[command].split()
    assert [list(each)[: len(fields)] for each in found] == [fields] * max(len(found), 1)
    if module == "gateway":
        for load in (found[0][name] for name in COMMANDS[command].split()[:-1]):
            assert 0 < load["added_ms_p50"] <= load["added_ms_p99"]
    if module == "checkpoint":
        parameters = 2 * 320 * 64 + 64 + 2 * (2 * 64 + 2 * 32 + 64 * 16 * 32 + 8 * 32 * 64 + 3 * 64 * 256)
        assert found[0]["bytes"] == found[0]["staging_bytes"] == 3 * 4 * parameters
        assert found[0]["bytes"] <= found[0]["read_bytes"] < 1.5 * found[0]["bytes"]


@pytest.mark.parametrize("command", list(COMMANDS)[:12])
def test_the_page_has_the_command_and_a_table(command, folder, monkeypatch, capsys):
    module, *arguments = command.format(folder=folder).split()
    arguments.append(f"--write={folder}/results/page.md")
    call(monkeypatch, module, arguments)
    assert len(capsys.readouterr().out.splitlines()) > 1
    page = (folder / "results/page.md").read_text()
    assert f"\npython -m benchmarks.{module} {' '.join(arguments)}\n" in page
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    assert {len({row.count("|") for row in table}) for table in tables} == {1}
    assert max(map(len, tables)) > 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("async_agents --latency-seconds=0", "--latency-seconds needs to be above 0, got 0"),
        ("packing --sequences=10 --ranks=4", "got 10 % 4 = 2"),
        ("staleness --staleness=-1", "--staleness needs at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(command, message, monkeypatch, capsys):
    module, *arguments = command.split()
    assert call(monkeypatch, module, arguments) == 2
    assert message in capsys.readouterr().err
