"""`megarl check --gpu`: tables of GPU memory by phase, and configurations that cannot fit."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reshard.published import QWEN3_8B
from megarl.cli.check import find_memory_problems, report_memory
from megarl.config import RunConfig, load_config
from megarl.megatron import mcore_fields
from megarl.megatron.families.load_architecture import load_architecture
from megarl.run.memory.gpu_demand import GIB, gpu_memory
from tests.cli.tiny_run import ROWS, write_config, write_rows, write_tiny_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """A run whose model folder has the sizes of Qwen3-8B, in files without data."""
    folder = tmp_path_factory.mktemp("memory")
    tree = write_tiny_run(folder)
    write_rows(folder / "train.jsonl", ROWS)
    model = folder / "model"
    (model / "config.json").write_text(json.dumps(QWEN3_8B))
    for file in model.glob("*.safetensors*"):
        file.unlink()
    _write_sparse_weights(model / "model.safetensors")
    tree["placement"] = {"slots_per_node": 8, "device": "cuda"}
    tree["rollout"] = {"max_new_tokens": 4096, "replicas": 8}
    tree["data"]["max_prompt_tokens"] = 1024
    return str(write_config(folder / "run.yaml", tree))


def _write_sparse_weights(path: Path) -> None:
    header, end = {}, 0
    for name, spec in load_architecture(QWEN3_8B, origin="").tensors("bfloat16").items():
        size = 2 * int(np.prod(spec.shape))
        header[name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        try:
            file.truncate(8 + len(encoded) + end)
        except OSError as error:
            pytest.skip(f"needs a file without data of {end / 1e9:.0f} GB: {error}")


JOB = ["--nodes", "1", "--gpus-per-node", "8"]
FULL = "trainer.recompute.granularity=full"


def test_prints_phases_owners_and_totals(run, recipe):
    code, out, err = run("check", recipe, *JOB, "--gpu", "h100-80", "--set", FULL)
    assert (code, err) == (0, "")
    lines = [line.removeprefix("# ") for line in out.splitlines() if line.startswith("# ")]
    start = next(i for i, line in enumerate(lines) if line.startswith("memory of GPU 0 of pool main"))
    assert "which needs most of 8: h100-80, 79.6 GiB" in lines[start]
    assert lines[start + 1].split() == ["sampling", "scoring", "training", "push"]
    table = {}
    for line in lines[start + 2 :]:
        match = re.fullmatch(r"(\S.*?)((?: +(?:-?[\d.]+|-)){4})", line)
        if match is None:
            break
        cells = [0.0 if cell == "-" else float(cell) for cell in match[2].split()]
        table[re.sub(" +", " ", match[1])] = cells
    total, left = table.pop("total"), table.pop("left")
    assert np.sum(list(table.values()), axis=0) == pytest.approx(total, abs=0.06)
    assert np.add(total, left) == pytest.approx([gpu_memory("h100-80") / GIB] * 4, abs=0.02)
    assert table["trainer policy gradients"] == [0.0, 0.0, 30.51, 0.0]
    assert table["engine weights"] == [15.26, 15.26, 0.0, 15.26]
    assert table["engine KV cache"][0] > 20
    assert "engine: largest mem_fraction that fits all phases 0.7" in out
    assert lines[-1] == "ok: no problems found for megarl train"


def test_refuses_what_cannot_fit_with_the_arithmetic(run, output, recipe):
    code, out, err = run("check", recipe, *JOB, "--gpu", "h100-80")
    assert code == 2
    assert "# memory of GPU 0 of pool main" in out
    (problem,) = [line for line in err.splitlines() if "training does not fit h100-80" in line]
    parts = re.findall(r"(?:trainer|engine) [a-zA-Z ]+ ([\d.]+)", problem)
    total, capacity = re.findall(r"= ([\d.]+) GiB > ([\d.]+);", problem)[0]
    assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.3)
    assert float(total) > float(capacity) == 79.6
    assert "trainer policy gradients 30.5 + trainer policy activations" in problem
    assert re.search(r"change one of trainer.parallel, trainer.optimizer.distributed.*trainer.recompute", problem)
    assert output("check", recipe, *JOB, "--gpu", "h200-141")


def test_an_unknown_gpu_is_refused(refusal, recipe):
    assert "--gpu: needs one of a10-24, " in refusal("check", recipe, *JOB, "--gpu", "h100")


ATTENTION = "trainer.megatron.model.attention_backend"
TORCH_LAYERS = "trainer.megatron.model.transformer_impl=local"


def test_names_both_remedies_where_a_gpu_lacks_attention(refusal, output, recipe, monkeypatch):
    """Transformer Engine would fall back to attention that stores all scores."""
    wide = ["--set", FULL, "trainer.parallel.tp=8"]
    problem = refusal("check", recipe, *JOB, "--gpu", "a100-80", *wide)
    assert f"{ATTENTION}: on compute capability 8.0 flash needs flash-attn 2 (2.1.1 or later, before 2.8.4)" in problem
    assert "install it, or set trainer.megatron.model.transformer_impl: local" in problem
    assert "# megatron: torch layers" in output("check", recipe, *JOB, "--gpu", "a100-80", *wide, TORCH_LAYERS)
    # on a machine without Transformer Engine, flash-attn that is asked for is that of the GPUs' nodes
    assert output("check", recipe, *JOB, "--gpu", "a100-80", *wide, f"{ATTENTION}=flash")
    monkeypatch.setattr(mcore_fields, "package_version", {"flash-attn": "2.8.3"}.get)
    assert output("check", recipe, *JOB, "--gpu", "a100-80", *wide)


def test_refuses_a_cache_that_holds_no_sequence(recipe):
    config = load_config(RunConfig, recipe, [FULL, "rollout.engine.mem_fraction=0.25"])
    (problem,) = find_memory_problems(config, report_memory(config, "h100-80"))
    assert "--gpu: sampling does not fit h100-80: on GPU 0 of pool main " in problem
    assert "one sequence needs 5,120 tokens * 147,456 bytes = 0.70 GiB; change one of rollout.tp, " in problem


def test_pools_have_tables_of_their_own(recipe):
    disaggregated = "placement={slots_per_node: 8, pools: {b: {slots_per_node: 8}}, rollout: {pool: b}}"
    config = load_config(RunConfig, recipe, [disaggregated, FULL])
    trainer, engines = report_memory(config, "h100-80")
    assert [*trainer.peaks] == ["scoring", "training", "push"]
    assert [*engines.peaks] == ["sampling", "push"]
    assert engines.fraction is not None
    assert engines.fraction.value == pytest.approx(0.83, abs=0.005)
    assert not [*find_memory_problems(config, [trainer, engines])]
