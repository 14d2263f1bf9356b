"""Files of a model folder beside its weights: config, tokenizer, chat templates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

TOKENIZER_PATTERNS = (
    *("tokenizer*.json", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tekken.json"),
    *("*.model", "*.model.v*", "*.tiktoken", "*.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""Files that tokenizers and their chat templates are read from."""

COMPANION_PATTERNS = (*TOKENIZER_PATTERNS, "*.json", "*.txt", "*.py")
"""The same with config.json, generation_config.json, and the code that `auto_map` of these files names."""


def find_companions(folder: Path, patterns: tuple[str, ...] = COMPANION_PATTERNS) -> Iterator[Path]:
    """Yield the files that accompany the weights in `folder`, without indexes of weight files, once each."""
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    yield from sorted(file for file in files if not file.name.endswith(".index.json"))


def copy_companions(source: Path, target: Path) -> None:
    """Copy all companions except config.json into the existing folder `target`; a no-op for those already there.

    Raises:
        OSError: a file cannot be copied.
    """
    for file in find_companions(source):
        copy = target / file.relative_to(source)
        if file.name != "config.json" and file.resolve() != copy.resolve():
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
