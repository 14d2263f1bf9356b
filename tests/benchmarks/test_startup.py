"""The startup benchmark: medians, the log of imports, and its table."""

import json
from dataclasses import asdict

import pytest

from benchmarks.startup.__main__ import main
from benchmarks.startup.measure import KINDS, Start, StartupReport, median_start, package_seconds
from benchmarks.startup.show import markdown

IMPORT_LOG = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |     torch._C
worker ready
import time:   1500000 |    1500100 |   torch
import time:    250000 |    1750100 | megarl.batch.pack
import time:       900 |        900 |     torch.cuda
"""


def start(seconds, **phases):
    cpu = dict.fromkeys(KINDS, 1.0)
    return Start(seconds=seconds, by_kind={"imports": seconds - 1, "ray": 1.0}, phases=phases, cpu_seconds=cpu)


def test_each_number_has_its_own_median():
    runs = [start(20.0, data=1.0, slots=5.0), start(30.0, data=3.0, slots=4.0), start(25.0, data=2.0)]
    found = median_start(runs)
    assert found.seconds == 25.0
    assert found.by_kind == {"imports": 24.0, "ray": 1.0}
    assert found.phases == {"data": 2.0, "slots": 4.0}
    assert found.cpu_seconds == dict.fromkeys(KINDS, 1.0)


def test_imports_are_summed_by_package():
    assert package_seconds(IMPORT_LOG) == {"torch": 1.501, "megarl": 0.25}
    assert package_seconds("") == {}


def test_report_as_table_and_json():
    runs = (start(20.0, data=1.0), start(22.0, data=2.0), start(21.0, data=1.5))
    imports = {"trainer": {"torch": 1.5, "megarl": 0.25}}
    report = StartupReport(config="demo.yaml", runs=runs, median=median_start(runs), imports=imports)
    table = markdown(report)
    assert "after 21.0 s: the median of 20.0, 22.0, 21.0 s" in table
    assert "| data | 1.50 |" in table
    assert "| trainer | torch 1.50, megarl 0.25 |" in table
    assert json.loads(json.dumps(asdict(report)))["median"]["seconds"] == 21.0


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--set", "trainer.stepz=1"]])
def test_invalid_arguments_are_refused(arguments, capsys):
    assert main(["--config", "yaml/demo.yaml", *arguments]) == 2
    assert "error: " in capsys.readouterr().err
