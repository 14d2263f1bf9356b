"""The code in a text of a policy, which writes it in a block between lines of backticks."""

from __future__ import annotations

FENCE = "```"
LABELS = ("python", "python3", "py", "py3")


def find_code(text: str) -> str | None:
    """Return the last block labelled as Python; without one, the last block that has no label; None without both.

    A block begins behind a line that ends in backticks and a label, and ends at a line that begins or ends with
    backticks. Blocks of another label, and backticks within a line, are text. Takes time in proportion to the text.
    """
    labelled: str | None = None
    unlabelled: str | None = None
    label: str | None = None  # of the block that is open
    lines = list[str]()
    for line in text.split("\n"):
        stripped = line.strip()
        if label is not None and not stripped.startswith(FENCE) and not stripped.endswith(FENCE):
            lines.append(line)
            continue
        opened = _opened_label(stripped, is_inside=label is not None)
        if label is not None:
            if not stripped.startswith(FENCE):
                lines.append(line.rstrip().rstrip("`"))
            code = "".join(f"{each}\n" for each in lines)
            if label in LABELS:
                labelled = code
            elif not label:
                unlabelled = code
        label, lines = opened, []
    return unlabelled if labelled is None else labelled


def _opened_label(line: str, *, is_inside: bool) -> str | None:
    """Return the label, in lower case, of the block that begins behind a line; None: it begins none.

    Inside a block, backticks without a label end it. Behind other text, a label has no spaces.
    """
    before, fence, after = line.rpartition(FENCE)
    before, label = before.rstrip("`"), after.strip().lower()
    if not fence or FENCE in before or (is_inside and not label):
        return None
    if before.strip("> \t"):
        return label if not is_inside and len(label.split()) <= 1 else None
    return label.partition(" ")[0]
