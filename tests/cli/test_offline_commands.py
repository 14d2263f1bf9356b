"""`megarl convert` and `megarl score`: checks of configuration, model, input and output before anything starts."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli.main import main
from megarl.cli.score import ScoreProgressBar
from megarl.cli.tools import model_conversion
from megarl.cli.tools.model_conversion import plan_export, plan_import
from megarl.cli.tools.token_scoring import ScoreProgress
from megarl.config import ConvertConfig, make_convert_config, make_score_config
from megarl.data.token_file import TokenCount
from megarl.errors import ConfigError, DataError
from megarl.megatron.checkpoint.checkpoint_files import find_weights
from megarl.megatron.command_workers import ConvertWorker
from tests.cli.tiny_run import write_rows
from tests.errors import expect_error
from tests.megatron.fidelity.models import CONFIGS, build
from tests.model_files.quantized import quantize_folder

pytestmark = pytest.mark.usefixtures("no_cluster")


@pytest.fixture
def checkpoint(tiny_model: Path, tmp_path) -> Path:
    """A checkpoint folder with the files that the checks read; only a few tensors."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    root = tmp_path / "checkpoint"
    (root / "release").mkdir(parents=True)
    shutil.copytree(tiny_model, root / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    (root / "release" / "metadata.json").write_text("{}")
    (root / "release" / "common.pt").touch()
    weights = {"embedding.word_embeddings.weight": torch.ones(8, 4, dtype=torch.bfloat16)}
    others = {"optimizer.state.exp_avg": torch.ones(8, 4), "decoder.layers.0.mlp.router.expert_bias": torch.ones(4)}
    save(weights | others, storage_writer=FileSystemWriter(root / "release"), no_dist=True)
    return root


@pytest.fixture
def refused(refusal) -> Callable[..., str]:
    """Function that runs a conversion, which has to be refused; returns the error output."""

    def convert(direction: str, folder: Path | str, *options: str, output: str = "out") -> str:
        return refusal("convert", direction, "--model", folder, "--output", output, *options)

    return convert


def test_default_slots_are_the_smallest_world_size():
    assert make_convert_config().sized_placement.slots == 1
    sizes = [f"trainer.parallel.{size}" for size in ("tp=2", "ep=3", "etp=1", "pp=2")]
    assert make_convert_config(sizes).sized_placement.slots == 12
    assert make_convert_config([*sizes, "placement.slots_per_node=24"]).sized_placement.slots == 24


@pytest.mark.parametrize(
    ("make", "override", "message"),
    [
        (make_convert_config, "trainer.optimizer.lr=1", "trainer.optimizer: unknown key"),
        (make_convert_config, "model.path=x", "model: unknown key"),
        (
            make_convert_config,
            "trainer.parallel.tp=0",
            "trainer.parallel.tp: Input should be greater than or equal to 1, got 0",
        ),
        (partial(make_score_config, "m"), "trainer.paralel.tp=2", "trainer.paralel: unknown key"),
        (partial(make_score_config, "m"), "rollout.tp=2", "rollout: unknown key"),
        (partial(make_score_config, "m"), "temperature=0", "temperature: Input should be greater than 0, got 0"),
    ],
)
def test_unknown_keys_and_invalid_values_are_rejected(make, override, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make([override])


def test_a_direction_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["convert"])
    assert "DIRECTION" in capsys.readouterr().err


def test_all_problems_are_reported_before_anything_starts(refused, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    sizes = ("trainer.parallel.tp=8", "trainer.parallel.pp=3", "placement.slots_per_node=5")
    err = refused("hf-to-megatron", folder, "--set", *sizes)
    for problem in (
        f"--model: {folder} holds no safetensors files",
        "trainer.parallel.tp: model.layers.0.self_attn.q_proj.weight has query heads that do not divide, 4 % 8",
        "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2",
        "placement: tp * pp * cp needs to divide the slots, got 5 % (8 * 3 * 1) = 5",
        "--output: needs a folder that is empty or not there yet, out holds 1 files",
    ):
        assert problem in err


def test_outputs_that_cannot_be_written_are_refused(refused, tiny_model, monkeypatch):
    Path("file").touch()
    Path("closed").mkdir()
    # root can write to any folder, regardless of its mode
    monkeypatch.setattr(model_conversion.os, "access", lambda path, _: Path(path).name != "closed")
    for output, problem in {
        "file": "--output: needs a folder that is empty or not there yet, file is a file\n",
        "closed/out": f"--output: closed/out needs a folder that can be written, {Path('closed').absolute()} cannot\n",
        "file/out": "--output: file/out needs a folder that can be written, ",
    }.items():
        assert problem in refused("hf-to-megatron", tiny_model, output=output)


def test_not_enough_disk_space(refused, tiny_model, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(model_conversion.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    num_bytes = sum(t.numel() * 4 for t in load_file(tiny_model / "model.safetensors").values())
    problem = f"--output: the weights need {num_bytes} bytes, out has 1000 free"
    assert problem in refused("hf-to-megatron", tiny_model)


def test_dtype_auto_keeps_all_precision(tiny_model, tmp_path):
    def dtype(asked="auto"):
        conversion = plan_import(ConvertConfig(), folder, tmp_path / "out", asked)
        return conversion.dtype, conversion.num_bytes

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    count = sum(t.numel() for t in tensors.values())
    assert dtype() == ("float32", 4 * count)
    assert dtype("bfloat16") == ("bfloat16", 2 * count)
    halves = {name: t.bfloat16() for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    assert dtype() == ("bfloat16", 2 * count)
    save_file(halves | {"model.norm.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")
    assert dtype() == ("float32", 4 * count)


def test_weights_in_fp8_become_bfloat16(tiny_model, tmp_path):
    folder = Path(quantize_folder(tiny_model, tmp_path / "fp8"))
    assert plan_import(ConvertConfig(), folder, tmp_path / "out", "auto").dtype == "bfloat16"
    (folder / "model-1.safetensors").unlink()  # the scales
    (folder / "model.safetensors.index.json").unlink()
    with expect_error(ConfigError, "_proj.weight_scale_inv"):
        plan_import(ConvertConfig(), folder, tmp_path / "out", "auto")


@pytest.mark.parametrize("trust", [False, True])
def test_a_valid_checkpoint_is_planned(trust, checkpoint, tmp_path):
    """Ranks read its index as the plan has."""
    conversion = plan_export(ConvertConfig(), checkpoint, tmp_path / "out", "auto", trust=trust)
    assert (conversion.dtype, conversion.weights) == ("bfloat16", checkpoint / "release")
    assert conversion.read == (ConvertWorker.read_trusted_checkpoint if trust else ConvertWorker.read_checkpoint)


def test_the_tracker_file_names_an_iteration(checkpoint):
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("30\n")
    with expect_error(DataError, "30", "/iter_0000030"):
        find_weights(checkpoint)
    (checkpoint / "release").rename(checkpoint / "iter_0000030")
    assert find_weights(checkpoint) == checkpoint / "iter_0000030"
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("last")
    with expect_error(DataError, "'last'", "iteration", "number"):
        find_weights(checkpoint)


def test_folders_that_are_no_models_or_checkpoints_are_rejected(refused, tiny_model):
    err = refused("hf-to-megatron", "none")
    assert err.startswith("error: --model: needs a folder in Hugging Face format, there is no")
    err = refused("megatron-to-hf", "none")
    assert "--model: needs the folder of a Megatron checkpoint, there is no folder none" in err
    err = refused("megatron-to-hf", tiny_model)
    assert f"--model: {tiny_model} is no Megatron checkpoint: latest_checkpointed_iteration.txt" in err


def test_missing_mtp_layers_are_reported(tmp_path):
    folder = tmp_path / "model"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    conversion = plan_import(ConvertConfig(), folder, tmp_path / "out", "auto")
    assert conversion.notices == (f"{folder}: config.json names 1 MTP layer, the folder has none: ignoring it",)


@pytest.mark.parametrize("name", ["release/metadata.json", "release/common.pt", "release/.metadata", "hf/config.json"])
def test_a_checkpoint_with_a_missing_file_is_rejected(name, refused, checkpoint):
    file = checkpoint / name
    file.unlink()
    problem = f"release is no distributed checkpoint of megatron-core: it has no {file.name}"
    if name == "hf/config.json":
        problem = f"{file} cannot be read: No such file or directory"
    assert problem in refused("megatron-to-hf", checkpoint)


def test_a_truncated_checkpoint_is_rejected(refused, checkpoint):
    (file,) = (checkpoint / "release").glob("*.distcp")
    size = file.stat().st_size
    os.truncate(file, size - 10)
    problem = f"{file} is cut short, its tensors need {size} bytes, got {size - 10}, 10 less"
    assert problem in refused("megatron-to-hf", checkpoint)
    file.unlink()
    problem = f"{file} is missing: the checkpoint's index places {size} bytes in it"
    assert problem in refused("megatron-to-hf", checkpoint)


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95", b"text", pickle.dumps({"no": "index"})])
def test_an_invalid_checkpoint_index_is_rejected(content, refused, checkpoint):
    (checkpoint / "release" / ".metadata").write_bytes(content)
    err = refused("megatron-to-hf", checkpoint)
    assert ".metadata cannot be read as the index of a checkpoint: " in err


class MakesFolder:
    """Its pickle creates a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return os.mkdir, (self._folder,)


def test_index_that_executes_code_is_refused_unless_trusted(refused, checkpoint, tmp_path):
    index, mark = checkpoint / "release" / ".metadata", tmp_path / "executed"
    index.write_bytes(pickle.dumps(MakesFolder(mark)))
    err = refused("megatron-to-hf", checkpoint)
    assert f"--model: {index} refers to posix.mkdir" in err
    assert "may execute code of its author: pass --trust" in err
    assert not mark.exists()
    err = refused("megatron-to-hf", checkpoint, "--trust")
    assert f"{index} cannot be read as the index of a checkpoint: " in err
    assert mark.exists()


def test_an_output_folder_that_appears_during_conversion_is_not_overwritten(tiny_model, tmp_path, monkeypatch):
    @contextmanager
    def ranks(_):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "created by another process").touch()
        yield Mock()

    monkeypatch.setattr(model_conversion, "started_group", ranks)
    conversion = plan_import(ConvertConfig(), tiny_model, tmp_path / "out", "auto")
    with expect_error(ConfigError, "/out", "Directory"):
        conversion.run(lambda _: None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "created by another process"]


def test_a_failed_conversion_leaves_no_files(tiny_model, tmp_path, monkeypatch):
    def fail(*_):
        (draft,) = tmp_path.glob(".out.partial")
        (draft / "half").touch()
        raise DataError("a rank failed")

    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left by an earlier attempt").touch()
    monkeypatch.setattr(model_conversion, "started_group", fail)
    conversion = plan_import(ConvertConfig(), tiny_model, tmp_path / "out", "auto")
    with expect_error(DataError, "failed"):
        conversion.run(lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_progress_off_a_terminal_is_plain_lines(run, tiny_model, monkeypatch):
    def convert(self, tell):
        tell("reading")
        return 1.5

    monkeypatch.setattr(model_conversion.Conversion, "run", convert)
    code, out, err = run("convert", "hf-to-megatron", "--model", tiny_model, "--output", "out")
    assert (code, out.split()) == (0, ["checkpoint", "out"])
    first, last = err.splitlines()
    assert first == "reading"
    assert last.endswith("of float32 in 1.5 s")


@pytest.fixture
def score_refused(tiny_model: Path, refusal, no_cluster) -> Callable[..., str]:
    """Function that runs the command on rows, which has to be score_refused; returns the error output."""

    def score(*rows: Any, folder: Path = tiny_model, output: str = "scores.jsonl", options=()) -> str:
        write_rows(Path("tokens.jsonl"), list(rows))
        return refusal("score", "--model", folder, "--input", "tokens.jsonl", "--output", output, *options)

    return score


def test_default_slots_for_scoring_are_the_smallest_world_size():
    assert make_score_config("m").sized_placement.slots == 1
    wide = make_score_config("m", ["trainer.parallel.tp=2", "trainer.parallel.pp=2", "placement.device=cpu"])
    assert (wide.sized_placement.slots, wide.sized_placement.device) == (4, "cpu")
    experts = make_score_config("m", [f"trainer.parallel.{size}" for size in ("tp=2", "ep=3", "etp=1", "pp=2")])
    assert experts.sized_placement.slots == 12


def test_more_slots_make_more_replicas():
    config = make_score_config("m", ["trainer.parallel.tp=2", "placement.slots_per_node=8", "placement.nodes=2"])
    assert config.sized_placement == config.placement
    assert make_score_config("m", ["placement.nodes=3"]).sized_placement.slots == 3


def test_invalid_lines_are_reported_before_anything_starts(score_refused, tmp_path):
    (tmp_path / "scores.jsonl").write_text("from an earlier run")
    assert score_refused({"token_ids": [1, 2]}, {"token_ids": [1, 384]}, {"id": 3}) == (
        "error: tokens.jsonl:2: token_ids[1] needs to be below the model's vocab_size = 384, got 384\n"
        "tokens.jsonl:3: needs a list of integers under token_ids, the line has 'id'\n"
    )
    assert (tmp_path / "scores.jsonl").read_text() == "from an earlier run"
    assert {path.name for path in tmp_path.iterdir()} == {"scores.jsonl", "tokens.jsonl"}


def test_inputs_that_cannot_be_scored_are_refused(score_refused, tmp_path):
    err = score_refused({"token_ids": [1] * 129})
    assert "token_ids has 129 tokens, 1 more than the model's max_position_embeddings = 128" in err
    err = score_refused({"token_ids": [1]}, folder=Path("none"))
    assert err.startswith("error: model.path: needs a folder in Hugging Face format")
    assert "tokens.jsonl is the input" in score_refused({"token_ids": [1]}, output="./tokens.jsonl")
    assert json.loads((tmp_path / "tokens.jsonl").read_text()) == {"token_ids": [1]}


def test_missing_weights_and_impossible_sizes_are_reported_together(score_refused, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    sizes = ("trainer.parallel.tp=3", "trainer.parallel.pp=3", "placement.slots_per_node=5")
    err = score_refused({"token_ids": [1]}, folder=folder, options=("--set", *sizes))
    assert f"model.path: {folder} " in err
    assert "trainer.parallel.tp: model.layers.0.self_attn.q_proj.weight has " in err
    assert "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2" in err
    assert "placement: tp * pp * cp needs to divide the slots, got 5 % (3 * 3 * 1) = 5" in err


def test_progress_of_scoring_off_a_terminal_is_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("megarl.cli.score.PROGRESS_INTERVAL_SECONDS", 0.0)
    with ScoreProgressBar(TokenCount(num_lines=3000, num_tokens=30_000)) as progress:
        progress.show(ScoreProgress(num_lines=1000, num_tokens=10_000, seconds=2.0))
        progress.show(ScoreProgress(num_lines=3000, num_tokens=30_000, seconds=5.0))
    lines = "scored 1,000/3,000 lines  5.00 ktok/s\nscored 3,000/3,000 lines  6.00 ktok/s  5.0 s\n"
    assert capsys.readouterr() == ("", lines)


def test_missing_mtp_layers_are_reported_before_scoring(score_refused, tmp_path):
    folder = tmp_path / "without-mtp"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    notice = f"model.path: {folder}: config.json names 1 MTP layer, the folder has none: ignoring it\n"
    assert notice in score_refused({"token_ids": []}, folder=folder)
