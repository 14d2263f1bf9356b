"""Limits the model files that SGLang imports to those of the model that an engine loads.

SGLang otherwise imports all of its models, more than 200 files, before it loads one.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.model_files.model_config import read_model_config

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable: names of the model files that SGLang does not import, separated by commas."""

FALLBACK = "transformers"
"""Name of the file with the models that SGLang takes from transformers."""


def skip_other_models(model_path: str) -> None:
    """Have SGLang, imported in this process or its children later, skip the files of other models.

    A variable that the user has set stays, and so does one for models from outside SGLang.
    """
    spec = importlib.util.find_spec("sglang")
    if VARIABLE in os.environ or "SGLANG_EXTERNAL_MODEL_PACKAGE" in os.environ or spec is None:
        return
    architectures = read_model_config(model_path).get("architectures", [])
    (folder,) = spec.submodule_search_locations or [""]
    os.environ[VARIABLE] = ",".join(find_other_models(Path(folder) / "srt" / "models", architectures))


def find_other_models(folder: Path, architectures: Sequence[str]) -> list[str]:
    """Return the names of the files in `folder` that define none of the classes; none if no file defines one."""
    defines = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    needed = {name for name, source in files.items() if defines.search(source)} if architectures else set()
    return [name for name in files if name not in (*needed, FALLBACK)] if needed else []
