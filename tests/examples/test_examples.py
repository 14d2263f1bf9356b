"""Every example: configurations load, pass `megarl check` and have a command in a README; modules and scripts work."""

import json
import math
import re
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megarl.cli.main import main
from megarl.config import STAGES, load_config
from megarl.config.run import TrackingConfig
from megarl.data.tiny_checkpoint import train_tokenizer
from megarl.megatron.families.load_architecture import load_architecture_from_folder
from megarl.model_files.header import encode_header
from megarl.tracking.tracker import Tracker
from tests.gsm8k import OWN_ROWS, PUBLISHED, needs_published

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
CONFIGURATIONS = sorted(EXAMPLES.glob("*/*.yaml"))
MODULES = sorted(path for path in EXAMPLES.glob("**/*.py") if not path.name.startswith("use_"))
"""All but programs for frameworks of others, which are installed in environments of their own."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_of(path: Path) -> set[str]:
    """Return the commands that the README beside `path` runs with this configuration, or checks it for."""
    text = (path.parent / "README.md").read_text()
    found = set()
    for name, options in re.findall(rf"megarl (\w+) {re.escape(relative(path))}([^\n`]*)", text):
        stage = re.search(r"--stage (\w+)", options)
        found.add(name if name != "check" else stage[1] if stage else "train")
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_folder_has_a_readme_and_something_to_run(folder):
    assert (folder / "README.md").is_file()
    assert [*folder.glob("*.yaml"), *folder.glob("*.py")]
    assert f"]({folder.name}" in (EXAMPLES / "README.md").read_text(), "examples/README.md does not list it"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=relative)
def test_a_configuration_loads_for_the_command_of_its_readme(path, monkeypatch):
    (command,) = re.findall(r"\$schema=\S*/(\w+)\.json$", path.read_text().splitlines()[0])
    assert commands_of(path) == {command}, f"README.md needs `megarl {command} {relative(path)}`"
    monkeypatch.syspath_prepend(path.parent)  # as with the PYTHONPATH of the README
    load_config(STAGES[command], path)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_imports(path):
    assert runpy.run_path(str(path))["__doc__"]


QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "use_sliding_window": False,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size", "tie_word_embeddings")
MODEL_CONFIGS = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2 | dict(zip(SIZES, (896, 4864, 24, 14, 2, 151936, True), strict=True)),
    "Qwen/Qwen2.5-7B-Instruct": QWEN2 | dict(zip(SIZES, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
}
"""Hub id -> the keys of its config.json that determine the architecture."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_published_shape(folder: Path, hub_id: str) -> Path:
    """Write a folder that `megarl check` takes for the model `hub_id`; return it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[hub_id]))
    tensors = {
        name: (spec.shape, spec.dtype)
        for name, spec in load_architecture_from_folder(folder).tensors("bfloat16").items()
    }
    header, stored = encode_header(tensors, folder / "model.safetensors")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(max(tensor.offset + tensor.num_bytes for tensor in stored.values()))
    tokenizer = train_tokenizer(["What is 1 + 1? #### 2"], 300, 32768)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["own rows", pytest.param("published", marks=needs_published)])
def gsm8k(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder with train.jsonl and test.jsonl."""
    if request.param == "published":
        return PUBLISHED
    rows = (OWN_ROWS / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows * 20)  # more than the prompts of a step
    (tmp_path / "test.jsonl").write_text(rows)
    return tmp_path


def data_overrides(folder: Path) -> list[str]:
    return [f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/test.jsonl"]


@pytest.mark.parametrize(
    ("config", "hub_id", "num_nodes", "overrides"),
    [
        ("gsm8k-grpo/gpu.yaml", "Qwen/Qwen2.5-0.5B-Instruct", 1, []),
        ("gsm8k-grpo/gpu.yaml", "Qwen/Qwen2.5-0.5B-Instruct", 1, ["placement.slots_per_node=1", "rollout.replicas=1"]),
        ("two-node-slurm/train.yaml", "Qwen/Qwen2.5-7B-Instruct", 2, []),
        (
            "two-node-slurm/train.yaml",
            "Qwen/Qwen2.5-7B-Instruct",
            2,
            [
                "placement.nodes=1",
                "placement.pools={engines: {nodes: 1, slots_per_node: 8}}",
                "placement.rollout.pool=engines",
                "rollout.replicas=4",
            ],
        ),
    ],
    ids=["one node", "one GPU", "two nodes", "disaggregated"],
)
def test_the_configurations_for_gpus_pass_megarl_check(config, hub_id, num_nodes, overrides, gsm8k, tmp_path, capsys):
    path = EXAMPLES / config
    assert f"path: {hub_id}" in path.read_text()
    model = write_published_shape(tmp_path / "model", hub_id)
    settings = [f"model.path={model}", *data_overrides(gsm8k), *overrides]
    nodes = ["--nodes", str(num_nodes), "--gpus-per-node", "8"]
    code = main(["check", str(path), *nodes, "--set", *settings])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "# ok: no problems found for megarl train"


SCRIPT: Mapping[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples/plot_curve.py"))
LIGHT, DARK = "#ffffff", "#0d1117"


def write_run(folder: Path, rewards: Mapping[int, float]) -> Path:
    """Write the metrics of a run as megarl does."""
    with Tracker(TrackingConfig(tensorboard=False), folder, notify=print) as tracker:
        for step, reward in rewards.items():
            tracker.log({"reward/mean": reward, "loss": 0.5}, step=step)
    return folder


def plot(*arguments: str | Path) -> int:
    return int(SCRIPT["main"]([str(word) for word in arguments]))


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_file_is_the_same_each_time_and_names_the_runs(tmp_path):
    runs = [write_run(tmp_path / name, {1: 0.25, 2: 0.5, 3: 0.75}) for name in ("first", "second")]
    files = [tmp_path / "new" / f"{i}.svg" for i in range(2)]
    for file in files:
        assert plot(*runs, "--metric", "reward/mean", "--out", file) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    texts = {element.text for element in ET.parse(files[0]).iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "reward/mean", "first", "second"} <= texts
    assert "dc:date" not in files[0].read_text()
    assert plot(runs[0], "--metric", "reward/mean", "--out", files[1]) == 0
    assert "first" not in files[1].read_text(), "one curve needs no legend"


def test_a_step_without_the_metric_is_left_out_and_no_number_is_a_gap(tmp_path):
    run = write_run(tmp_path / "run", {1: 0.25, 2: math.nan})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "eval/accuracy": 0.5}) + '\n{"step": 3, "reward/me')
    curve = SCRIPT["read_curve"](run, "reward/mean")
    assert (curve[1], math.isnan(curve[2]), len(curve)) == (0.25, True, 2)
    assert SCRIPT["read_curve"](run, "eval/accuracy") == {2: 0.5}


def test_a_missing_metric_is_answered_by_the_names_that_exist(tmp_path, capsys):
    run = write_run(tmp_path / "run", {1: 0.25})
    assert plot(run, "--metric", "reward", "--out", tmp_path / "curve.svg") == 2
    expected = f"error: {run}/metrics.jsonl has no metric reward; it has:\n  loss\n  reward/mean\n"
    assert capsys.readouterr().err == expected
    assert plot(tmp_path, "--metric", "reward", "--out", tmp_path / "curve.svg") == 2
    assert f"there is no {tmp_path}/metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "curve.svg").exists()


def test_runs_of_the_same_name_are_labeled_by_their_paths():
    assert SCRIPT["label_runs"]([Path("a/run"), Path("b/other")]) == ["run", "other"]
    assert SCRIPT["label_runs"]([Path("a/run"), Path("b/run")]) == ["a/run", "b/run"]


@pytest.mark.parametrize("color", [SCRIPT["GRAY"], *SCRIPT["COLORS"]])
def test_colors_are_readable_on_light_and_dark_backgrounds(color):
    assert min(contrast(color, LIGHT), contrast(color, DARK)) > 4


EXAMPLE = Path(__file__).parents[2] / "examples/real-model"


@pytest.fixture(scope="module")
def reward() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "reward.py"))


def test_held_out_prompts_share_no_word_with_the_training_data(tmp_path):
    runpy.run_path(str(EXAMPLE / "make_data.py"))["main"](tmp_path)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (1770, 240)
    words = [{word for row in rows for word in row["words"].split()} for rows in (train, heldout)]
    assert not words[0] & words[1]
    for rows in (train, heldout):
        assert len({frozenset(row["words"].split()) for row in rows}) == len(rows)
        assert all(set(row["words"].split()) <= set(row["prompt"][-1]["content"][:-1].split()) for row in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The lamp stood on the old piano.", 1.0),
        (" The lamp's light fell on a piano and the lamp. ", 1.0),
        ("The lamps stood on the old piano.", 0.0),
        ("The lamp stood on the old piano", 0.0),
        ("The lamp stood on the old piano. It was red.", 0.0),
        ("the lamp stood on the old piano.", 0.0),
        ("A lamp and a piano.", 0.0),
        ("The lamp " + "really " * 13 + "lit the piano.", 0.0),
    ],
)
def test_the_reward_is_for_one_sentence_of_bounded_length_with_both_words(reward, text, expected):
    assert reward["sentence"](None, text, {"words": "lamp piano"}) == expected


def test_the_control_permutes_the_rewards_of_a_group(reward):
    sums = torch.zeros(8)
    for index in range(200):
        texts = ["The lamp stood on the old piano.", "The piano and the lamp were both red."] + [f"{index}"] * 6
        rewards = reward["shuffled"]([None] * 8, texts, {"words": "lamp piano"})
        assert sorted(rewards) == [0.0] * 6 + [1.0] * 2
        assert rewards == reward["shuffled"]([None] * 8, texts, {"words": "lamp piano"})
        sums += torch.tensor(rewards)
    assert sums.max() < 0.25 * 200 + 5 * (0.25 * 0.75 * 200) ** 0.5  # 5 standard deviations above equal chances
    assert sums.min() > 0.25 * 200 - 5 * (0.25 * 0.75 * 200) ** 0.5


def test_gguf_rows_give_the_attention_of_llama_cpp():
    """llama.cpp rotates the row pairs (2 i, 2 i + 1), transformers (i, i + size / 2): both give the same scores."""
    interleave_halves = runpy.run_path(str(EXAMPLE / "make_model.py"))["interleave_halves"]
    heads, size, hidden, position = 3, 8, 16, 5.0
    gguf = [torch.randn(heads * size, hidden, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(2))
    angles = position * 10000.0 ** (-torch.arange(0, size, 2) / size)

    def rotated_pairs(weight):
        pairs = (x @ weight.T).reshape(2, heads, size // 2, 2)
        turn = torch.polar(torch.ones(size // 2), angles)
        rotated = torch.view_as_complex(pairs[1].contiguous()) * turn  # the second token, at `position`
        return torch.stack([pairs[0].flatten(1), torch.view_as_real(rotated).flatten(1)])

    query, key = map(rotated_pairs, gguf)
    expected = torch.einsum("hs,hs->h", query[1], key[0])

    query, key = (
        (x @ interleave_halves(weight, heads).T).reshape(1, 2, heads, size).transpose(1, 2) for weight in gguf
    )
    both = torch.stack([torch.zeros(size // 2), angles])
    cos, sin = (torch.cat([part, part], -1)[None] for part in (both.cos(), both.sin()))
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    assert torch.allclose((query[0, :, 1] * key[0, :, 0]).sum(-1), expected, atol=1e-4)
