"""`megarl convert`: checks of configuration, model, checkpoint and output before anything starts."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli.main import main
from megarl.config import ConvertConfig, make_convert_config
from megarl.errors import ConfigError, DataError
from megarl.megatron.checkpoint.checkpoint_files import find_weights
from megarl.megatron.convert_worker import ConvertWorker
from megarl.offline import model_conversion
from megarl.offline.model_conversion import plan_export, plan_import
from tests.cli.tiny_run import write_tiny_run
from tests.megatron.fidelity.models import CONFIGS, build
from tests.model_files.quantized import quantize_folder

Convert = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder: 4 heads, 2 key-value heads, 2 layers, 384 token ids; float32."""
    folder = tmp_path_factory.mktemp("convert")
    write_tiny_run(folder)
    return folder / "model"


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """A checkpoint folder with the files that the checks read; only a few tensors."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    root = tmp_path / "checkpoint"
    (root / "release").mkdir(parents=True)
    shutil.copytree(model, root / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    (root / "release" / "metadata.json").write_text("{}")
    (root / "release" / "common.pt").touch()
    weights = {"embedding.word_embeddings.weight": torch.ones(8, 4, dtype=torch.bfloat16)}
    others = {"optimizer.state.exp_avg": torch.ones(8, 4), "decoder.layers.0.mlp.router.expert_bias": torch.ones(4)}
    save(weights | others, storage_writer=FileSystemWriter(root / "release"), no_dist=True)
    return root


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Function that runs the command in `tmp_path`; starting a cluster fails the test."""

    def start(*_: Any) -> None:
        raise AssertionError("the cluster was started")

    def run(direction: str, folder: Path | str, *options: str, output: str = "out") -> int:
        return main(["convert", direction, "--model", str(folder), "--output", output, *options])

    monkeypatch.setattr("megarl.controller.ray_session.start_cluster", start)
    monkeypatch.chdir(tmp_path)
    return run


def test_default_slots_are_the_smallest_world_size() -> None:
    assert make_convert_config().sized_placement.slots == 1
    sizes = [f"trainer.parallel.{size}" for size in ("tp=2", "ep=3", "etp=1", "pp=2")]
    assert make_convert_config(sizes).sized_placement.slots == 12
    assert make_convert_config([*sizes, "placement.slots_per_node=24"]).sized_placement.slots == 24


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.optimizer.lr=1", "trainer.optimizer: unknown key"),
        ("model.path=x", "model: unknown key"),
        ("trainer.parallel.tp=0", "trainer.parallel.tp: Input should be greater than or equal to 1, got 0"),
    ],
)
def test_unknown_keys_and_invalid_values_are_rejected(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_convert_config([override])
    assert str(error.value) == message


def test_a_direction_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert"])
    assert "DIRECTION" in capsys.readouterr().err


def test_all_problems_are_reported_before_anything_starts(
    convert: Convert, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    sizes = ("trainer.parallel.tp=8", "trainer.parallel.pp=3", "placement.slots_per_node=5")
    assert convert("hf-to-megatron", folder, "--set", *sizes) == 2
    err = capsys.readouterr().err
    assert f"--model: {folder} holds no safetensors files" in err
    assert (
        "trainer.parallel.tp: model.layers.0.self_attn.q_proj.weight has query heads that do not divide, 4 % 8" in err
    )
    assert "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2" in err
    assert "placement: tp * pp * cp needs to divide the slots, got 5 % (8 * 3 * 1) = 5" in err
    assert "--output: needs a folder that is empty or not there yet, out holds 1 files" in err


def test_missing_model_folder(convert: Convert, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("hf-to-megatron", "none") == 2
    assert capsys.readouterr().err.startswith("error: --model: needs a folder in Hugging Face format, there is no")


def test_output_is_a_file(convert: Convert, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").touch()
    assert convert("hf-to-megatron", model) == 2
    assert capsys.readouterr().err == (
        "error: --output: needs a folder that is empty or not there yet, out is a file\n"
    )


def test_output_is_not_writable(
    convert: Convert, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # root can write to any folder, regardless of its mode
    monkeypatch.setattr(model_conversion.os, "access", lambda path, _: Path(path).name != "closed")
    Path("closed").mkdir()
    assert convert("hf-to-megatron", model, output="closed/out") == 2
    closed = Path("closed").absolute()
    message = f"error: --output: closed/out needs a folder that can be written, {closed} cannot\n"
    assert capsys.readouterr().err == message


def test_parent_of_the_output_is_a_file(convert: Convert, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert convert("hf-to-megatron", model, output="file/out") == 2
    assert "--output: file/out needs a folder that can be written, " in capsys.readouterr().err


def test_not_enough_disk_space(
    convert: Convert, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(model_conversion.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    num_bytes = sum(t.numel() * 4 for t in load_file(model / "model.safetensors").values())
    assert convert("hf-to-megatron", model) == 2
    assert f"--output: the weights need {num_bytes} bytes, out has 1000 free" in capsys.readouterr().err


def test_dtype_auto_keeps_all_precision(model: Path, tmp_path: Path) -> None:
    def dtype(asked: str = "auto") -> tuple[str, int]:
        conversion = plan_import(ConvertConfig(), folder, tmp_path / "out", asked)
        return conversion.dtype, conversion.num_bytes

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    count = sum(t.numel() for t in tensors.values())
    assert dtype() == ("float32", 4 * count)
    assert dtype("bfloat16") == ("bfloat16", 2 * count)
    halves = {name: t.bfloat16() for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    assert dtype() == ("bfloat16", 2 * count)
    save_file(halves | {"model.norm.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")
    assert dtype() == ("float32", 4 * count)


def test_weights_in_fp8_become_bfloat16(model: Path, tmp_path: Path) -> None:
    folder = Path(quantize_folder(model, tmp_path / "fp8"))
    assert plan_import(ConvertConfig(), folder, tmp_path / "out", "auto").dtype == "bfloat16"
    (folder / "model-1.safetensors").unlink()  # the scales
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"_proj.weight_scale_inv are missing; \d+ more weights likewise"):
        plan_import(ConvertConfig(), folder, tmp_path / "out", "auto")


def test_a_valid_checkpoint_is_planned(checkpoint: Path, tmp_path: Path) -> None:
    conversion = plan_export(ConvertConfig(), checkpoint, tmp_path / "out", "auto")
    assert conversion.dtype == "bfloat16"
    assert conversion.weights == checkpoint / "release"


def test_the_tracker_file_names_an_iteration(checkpoint: Path) -> None:
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("30\n")
    with pytest.raises(DataError, match=r"names 30, and there is no folder .*/iter_0000030"):
        find_weights(checkpoint)
    (checkpoint / "release").rename(checkpoint / "iter_0000030")
    assert find_weights(checkpoint) == checkpoint / "iter_0000030"
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("last")
    with pytest.raises(DataError, match=r"needs the number of an iteration or `release`, got 'last'"):
        find_weights(checkpoint)


def test_folders_that_are_not_checkpoints_are_rejected(
    convert: Convert, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("megatron-to-hf", "none") == 2
    assert "--model: needs the folder of a Megatron checkpoint, there is no folder none" in capsys.readouterr().err
    assert convert("megatron-to-hf", model) == 2
    assert f"--model: {model} is no Megatron checkpoint: latest_checkpointed_iteration.txt" in capsys.readouterr().err


def test_missing_mtp_layers_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    conversion = plan_import(ConvertConfig(), folder, tmp_path / "out", "auto")
    assert conversion.notice == f"{folder}: config.json names 1 MTP layer, the folder has none: ignoring it"


def test_an_output_folder_that_appears_during_conversion_is_not_overwritten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ranks(_: Any) -> Iterator[Any]:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "created by another process").touch()
        yield Mock()

    monkeypatch.setattr(model_conversion, "_started_group", ranks)
    conversion = plan_import(ConvertConfig(), model, tmp_path / "out", "auto")
    with pytest.raises(ConfigError, match=r"--output: .*/out cannot be written: Directory not empty"):
        conversion.run(lambda _: None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "created by another process"]


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata"])
def test_a_checkpoint_with_a_missing_file_is_rejected(
    name: str, convert: Convert, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "release" / name).unlink()
    assert convert("megatron-to-hf", checkpoint) == 2
    assert f"release is no distributed checkpoint of megatron-core: it has no {name}" in capsys.readouterr().err


def test_a_truncated_checkpoint_is_rejected(
    convert: Convert, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (checkpoint / "release").glob("*.distcp")
    size = file.stat().st_size
    os.truncate(file, size - 10)
    assert convert("megatron-to-hf", checkpoint) == 2
    assert f"{file} is cut short, its tensors need {size} bytes, got {size - 10}, 10 less" in capsys.readouterr().err
    file.unlink()
    assert convert("megatron-to-hf", checkpoint) == 2
    assert f"{file} is missing: the checkpoint's index places {size} bytes in it" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95", b"text", pickle.dumps({"no": "index"})])
def test_an_invalid_checkpoint_index_is_rejected(
    content: bytes, convert: Convert, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "release" / ".metadata").write_bytes(content)
    assert convert("megatron-to-hf", checkpoint) == 2
    assert ".metadata cannot be read as the index of a checkpoint: " in capsys.readouterr().err


class MakesFolder:
    """Its pickle creates a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return os.mkdir, (self._folder,)


def test_index_that_executes_code_is_refused_unless_trusted(
    convert: Convert, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, mark = checkpoint / "release" / ".metadata", tmp_path / "executed"
    index.write_bytes(pickle.dumps(MakesFolder(mark)))
    assert convert("megatron-to-hf", checkpoint) == 2
    assert capsys.readouterr().err == (
        f"error: --model: {index} refers to posix.mkdir, which no index of a checkpoint needs; reading it may execute "
        "code of its author: pass --trust if you trust the author\n"
    )
    assert not mark.exists()
    assert convert("megatron-to-hf", checkpoint, "--trust") == 2
    assert f"{index} cannot be read as the index of a checkpoint: " in capsys.readouterr().err
    assert mark.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_ranks_read_an_index_as_planned(trust: bool, checkpoint: Path, tmp_path: Path) -> None:
    conversion = plan_export(ConvertConfig(), checkpoint, tmp_path / "out", "auto", trust=trust)
    assert conversion.read == (ConvertWorker.read_trusted_checkpoint if trust else ConvertWorker.read_checkpoint)


def test_a_checkpoint_without_config_json_is_rejected(
    convert: Convert, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "hf" / "config.json").unlink()
    assert convert("megatron-to-hf", checkpoint) == 2
    assert f"{checkpoint}/hf/config.json cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_failed_conversion_leaves_no_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        (draft,) = tmp_path.glob(".out.partial")
        (draft / "half").touch()
        raise DataError("a rank failed")

    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left by an earlier attempt").touch()
    monkeypatch.setattr(model_conversion, "_started_group", fail)
    conversion = plan_import(ConvertConfig(), model, tmp_path / "out", "auto")
    with pytest.raises(DataError, match="a rank failed"):
        conversion.run(lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_progress_off_a_terminal_is_plain_lines(
    convert: Convert, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: model_conversion.Conversion, tell: Callable[[str], None]) -> float:
        tell("reading")
        return 1.5

    monkeypatch.setattr(model_conversion.Conversion, "run", run)
    assert convert("hf-to-megatron", model) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["checkpoint", "out"]
    assert err.splitlines()[0] == "reading"
    assert err.splitlines()[1].endswith("of float32 in 1.5 s")
