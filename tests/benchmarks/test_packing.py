"""The packing benchmark: reference schemes, measurements, and the quality of megarl's plans."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.packing.__main__ import MODELS, main
from benchmarks.packing.karmarkar_karp import partition, partition_equally
from benchmarks.packing.lengths import Gsm8k, PackingWorkload, make_packing_workloads
from benchmarks.packing.measure import measure
from benchmarks.packing.schemes import OURS, SCHEMES
from benchmarks.packing.show import COLUMNS
from megarl.batch.balance import SequenceCost
from megarl.errors import DataError

ROOT = Path(__file__).parents[2]

FIELDS = (
    "lengths model seed sequences ranks max_tokens align scheme micro_batches micro_batches_bound padding_percent "
    "fill_percent fullest_percent cost_max_over_mean step_cost plan_seconds"
)
LINEAR = SequenceCost(matmul_parameters=1, attention_layers=0, attention_width=0)


def reports(workload, model="qwen2.5-0.5b", ranks=8, seed=0):
    cost = MODELS[model]
    measured = {
        name: measure(name, workload, model=model, cost=cost, ranks=ranks, align=1, seed=seed) for name in SCHEMES
    }
    return measured.pop(OURS), measured


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_lengths_have_little_padding_and_are_balanced(model, seed):
    workload = next(w for w in make_packing_workloads(1000, seed) if w.name == "lognormal")
    ours, others = reports(workload, model, seed=seed)
    assert ours.padding_percent <= 2
    assert ours.cost_max_over_mean <= 1.05
    assert ours.step_cost <= 1.05
    assert ours.fullest_percent <= 100
    assert ours.micro_batches == ours.micro_batches_bound
    assert all(ours.step_cost < other.step_cost for other in others.values())
    assert all(ours.micro_batches <= other.micro_batches for other in others.values())


@pytest.mark.parametrize("name", ["bimodal", "uniform"])
def test_bimodal_and_uniform_lengths_are_balanced(name):
    workload = next(w for w in make_packing_workloads(1000, 0) if w.name == name)
    ours, others = reports(workload)
    assert ours.micro_batches == ours.micro_batches_bound
    assert 1 <= ours.step_cost <= 1.01
    assert all(ours.step_cost < other.step_cost for other in others.values())


def test_every_scheme_plans_each_sequence_once_in_equally_many_micro_batches():
    for workload in make_packing_workloads(64, 3):
        for scheme in SCHEMES.values():
            plan = scheme(workload.lengths_N.tolist(), 4, workload.max_tokens, LINEAR)
            assert len({len(rank) for rank in plan}) == 1
            assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(64))


def test_measurements_match_counts_by_hand():
    workload = PackingWorkload(name="four", max_tokens=16, lengths_N=np.array([9, 3, 1, 5]))
    common = {"model": "linear", "cost": LINEAR, "ranks": 2, "align": 2, "seed": 0}
    padded = measure("padded", workload, **common)
    # rows of 10 tokens, one to a micro-batch, whose 10 tokens become 16: two micro-batches on each rank
    assert (padded.micro_batches, padded.micro_batches_bound) == (2, 1)
    assert padded.padding_percent == pytest.approx(100 * (64 - 18) / 64)
    assert padded.step_cost == pytest.approx(64 / 18)
    fit = measure("first_fit", workload, **common)
    # aligned 10, 4, 2, 6: [10, 4, 2] fills one pack, [6] becomes 8
    assert fit.micro_batches == 1
    assert fit.padding_percent == pytest.approx(100 * (24 - 18) / 24)
    assert fit.fill_percent == pytest.approx(100 * 18 / 32)
    assert fit.fullest_percent == 100
    assert fit.cost_max_over_mean == pytest.approx(16 / 12)
    assert fit.step_cost == pytest.approx(16 * 2 / 18)


def test_idle_rank_computes_a_pack_of_padding():
    workload = PackingWorkload(name="one", max_tokens=16, lengths_N=np.array([16]))
    report = measure(OURS, workload, model="linear", cost=LINEAR, ranks=2, align=1, seed=0)
    assert report.padding_percent == pytest.approx(100 * 8 / 24)
    assert report.fullest_percent == 0


def test_largest_differencing_on_small_inputs():
    # for 4 5 6 7 8 the algorithm gives 14 | 16, although 15 | 15 is possible
    sizes = [4, 5, 6, 7, 8]
    assert sorted(sum(sizes[i] for i in part) for part in partition(sizes, 2)) == [14, 16]
    assert sorted(map(sorted, partition([1, 1, 1, 9], 2))) == [[0, 1, 2], [3]]
    equal = partition_equally([1, 1, 1, 9], 2)
    assert [len(part) for part in equal] == [2, 2]
    assert sorted(i for part in equal for i in part) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="3 % 2 = 1"):
        partition_equally([1, 2, 3], 2)


@pytest.mark.parametrize("seed", range(10))
def test_largest_differencing_is_balanced_on_many_sizes(seed):
    sizes = np.random.default_rng(seed).integers(1, 1000, 200).tolist()
    for parts in (partition(sizes, 7), partition_equally(sizes, 8)):
        totals = [sum(sizes[i] for i in part) for part in parts]
        assert max(totals) - min(totals) <= 0.01 * max(totals)


@pytest.fixture
def gsm8k_folder(tmp_path):
    rows = [{"question": f"Has {n} pens.", "answer": "No." * n} for n in range(1, 13)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_gsm8k_counts_words_digits_and_punctuation(gsm8k_folder):
    data = Gsm8k(gsm8k_folder)
    workload = data.sample(12, 0)
    # "Has 7 pens." has 4, "Has 12 pens." 5; each "No." 2
    assert sorted(workload.lengths_N) == [4 + (n > 9) + 2 * n for n in range(1, 13)]
    with pytest.raises(DataError, match="GSM8K needs 13 rows to sample --sequences, got 12"):
        data.sample(13, 0)


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["benchmarks.packing", *map(str, args)])
    return main()


def test_json_has_stable_fields(monkeypatch, capsys, gsm8k_folder):
    assert run(monkeypatch, "--json", "--sequences=12", "--ranks=4", "--seeds=2", "--gsm8k", gsm8k_folder) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == len(MODELS) * 2 * 4 * len(SCHEMES)
    assert all(list(report) == FIELDS.split() for report in found)
    assert {report["lengths"] for report in found} == {"lognormal", "bimodal", "uniform", "gsm8k"}


def test_table_and_file(monkeypatch, capsys, tmp_path):
    file = tmp_path / "results" / "packing.md"
    assert run(monkeypatch, "--sequences=16", "--seeds=1", "--models=qwen2.5-7b", "--write", file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * len(SCHEMES)
    written = file.read_text()
    assert "python -m benchmarks.packing --sequences=16 --seeds=1 --models=qwen2.5-7b" in written
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert table[0] == "| " + " | ".join(COLUMNS) + " |"
    assert len(table) == 2 + 3 * len(SCHEMES)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sequences=10", "--ranks=4"], "got 10 % 4 = 2"),
        (["--seeds=0"], "--seeds needs at least 1, got 0"),
        (["--gsm8k=nowhere"], "no such data file"),
    ],
)
def test_invalid_arguments_are_refused(monkeypatch, capsys, args, message):
    assert run(monkeypatch, *args) == 2
    assert message in capsys.readouterr().err


def test_the_documentation_quotes_the_results():
    rows = [line.split("|")[1:-1] for line in (ROOT / "benchmarks/results/packing.md").read_text().splitlines()]
    table = {tuple(cell.strip() for cell in row[:3]): row for row in rows if len(row) == 13}
    header = next(row for row in rows if len(row) == 13 and row[0].strip() == "lengths")
    columns = [[cell.strip() for cell in header].index(name) for name in ("cost max/mean", "step cost")]

    def quoted(scheme):
        row = table["lognormal", "qwen2.5-7b", scheme]
        return [f"{100 * (float(row[column]) - 1):.1f} %" for column in columns]

    models, readme = (ROOT / "docs/models.md").read_text(), (ROOT / "README.md").read_text()
    for scheme, label in (
        (OURS, "megarl"),
        ("karmarkar_karp_cost", "Karmarkar-Karp on costs, as in verl"),
        ("karmarkar_karp", "Karmarkar-Karp on token counts, as in earlier versions of verl"),
        ("first_fit", "first-fit packing"),
    ):
        assert f"| {label} | {' | '.join(quoted(scheme))} |" in models
    (ours, ours_moe), (theirs, theirs_moe) = quoted(OURS), quoted("karmarkar_karp_cost")
    line = next(line for line in readme.splitlines() if line.startswith("| packing, planned for Qwen2.5-7B"))
    assert f"takes {ours} longer than a perfect split, {theirs} with verl's scheme; with experts {ours_moe}" in line
    assert f"{ours_moe} and {theirs_moe}" in line
