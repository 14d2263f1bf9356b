"""DeepSeek-V3 folders without the MTP layers that config.json names, as transformers' save_pretrained writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.megatron.families.load_architecture import load_architecture, load_architecture_and_dtype
from megarl.megatron.families.model_folder import (
    describe_ignored_mtp_layers,
    find_weight_problems,
    load_architecture_from_folder,
)
from tests.megatron.families.tiny import DEEPSEEK_V3

MTP_PREFIXES = ("model.layers.4.", "model.layers.5.")


def write_model(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a DeepSeek-V3 folder; leave out tensors whose names start with one of `without`."""
    config = DEEPSEEK_V3 | changes
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {n: spec.shape for n, spec in load_architecture(config, origin="test").tensors("float32").items()}
    save_file(
        {n: np.zeros(shape, np.float32) for n, shape in shapes.items() if not n.startswith(without)},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(("number", "names", "ignored"), [(1, "1 MTP layer", "it"), (2, "2 MTP layers", "them")])
def test_a_folder_without_mtp_tensors_is_loaded_without_mtp_layers(
    tmp_path: Path, number: int, names: str, ignored: str
) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES, num_nextn_predict_layers=number)
    model = load_architecture_from_folder(folder)
    assert (model.num_mtp_layers, model.duplicated_tensors()) == (0, {})
    assert load_architecture_and_dtype(str(folder))[0] == model
    assert find_weight_problems(folder, model) == []
    notice = f"{folder}: config.json names {names}, the folder has none: ignoring {ignored}"
    assert describe_ignored_mtp_layers(folder) == notice


def test_copies_of_embedding_and_head_are_no_mtp_layer(tmp_path: Path) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES)
    copies = {f"model.layers.4.{name}.weight": np.zeros((331, 48), np.float32) for name in ("embed_tokens",)}
    save_file(copies, folder / "copies.safetensors")
    model = load_architecture_from_folder(folder)
    assert (model.num_mtp_layers, find_weight_problems(folder, model)) == (0, [])


@pytest.mark.parametrize("missing", ["model.layers.4.eh_proj.weight", "model.layers.5."])
def test_a_folder_with_some_mtp_tensors_is_rejected(tmp_path: Path, missing: str) -> None:
    folder = write_model(tmp_path, without=(missing,), num_nextn_predict_layers=2)
    model = load_architecture_from_folder(folder)
    assert model.num_mtp_layers == 2
    (problem,) = find_weight_problems(folder, model)
    assert problem.startswith(f"{folder} lacks ")
    assert f"first {missing}" in problem
    assert describe_ignored_mtp_layers(folder) is None


def test_mtp_layers_are_kept_if_the_folder_has_them_or_has_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert load_architecture_from_folder(folder).num_mtp_layers == 1
    assert describe_ignored_mtp_layers(folder) is None
    (folder / "model.safetensors").unlink()
    assert load_architecture_from_folder(folder).num_mtp_layers == 1
    assert load_architecture_and_dtype(str(folder / "config.json"))[0].num_mtp_layers == 1
    assert describe_ignored_mtp_layers(folder) is None


def test_a_value_model_has_no_mtp_layers_to_ignore(tmp_path: Path) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES)
    assert load_architecture_from_folder(folder, head="value").num_mtp_layers == 0
    assert describe_ignored_mtp_layers(folder, head="value") is None
