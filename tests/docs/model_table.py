"""The table of model families in docs/models.md, from the code, published config.json files and the tests.

`python -m tests.docs.model_table` writes it.
"""

from collections.abc import Sequence
from pathlib import Path

from megarl.controller.preflight.model_checks import describe_layers
from megarl.megatron.families.load_architecture import FAMILY_READERS, TEXT_PARTS
from megarl.model_files.model_config import ARCHITECTURES
from tests.engines.sglang.test_agreement import FAST_MODELS, SLOW_MODELS
from tests.engines.sglang.weight_layout.test_offline_trace import MODELS as TRACED
from tests.megatron.families.test_published_configs import ACCEPTED, REFUSED, published, read
from tests.megatron.fidelity.models import CONFIGS
from tests.megatron.fidelity.test_layouts import CASES

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- families: written by python -m tests.docs.model_table -->\n", "<!-- end of families -->\n"


def table() -> str:
    """Return the lines of the table of families, and of that of published models that are refused."""
    lines = ["| family | published models | layers | compared with transformers | SGLang |", "|---|---|---|---|---|"]
    for architecture in (*FAMILY_READERS, *TEXT_PARTS):
        models = [name for name in ACCEPTED if published(name)["architectures"][0] == architecture]
        layers = "; ".join(dict.fromkeys(describe_layers(read(name)) for name in models)) or "-"
        lines.append(f"| `{architecture}` | {', '.join(models) or '-'} | {layers} | {compared(architecture)} |")
    lines += ["", "| published model | why it is refused |", "|---|---|"]
    lines += [f"| {name} | {message.replace('.*', '...')} |" for name, message in REFUSED.items()]
    return "\n".join(lines) + "\n"


def compared(architecture: str) -> str:
    """Return the cells about tests: layouts of the trainer, and what was compared with SGLang."""
    kinds = [kind for kind, of in ARCHITECTURES.items() if of == architecture]
    tested = [name for name, config in CONFIGS.items() if config["model_type"] in kinds]
    layouts = {layout for name, layout in CASES if name in tested}
    on_engine = [name for name in (*FAST_MODELS, *SLOW_MODELS) if name in tested]
    served = ["CPU engine"] if on_engine else []
    served += ["layout"] if _is_traced(architecture, kinds) else []
    if architecture in TEXT_PARTS:
        return "language model, and export with the vision tower | " + (
            "layout" if architecture.startswith("Qwen3_5") else "-"
        )
    trainer = f"one rank; {len(layouts)} layouts with one rank" if tested else "tensors"
    return f"{trainer} | {', '.join(served) or '-'}"


def _is_traced(architecture: str, kinds: Sequence[str]) -> bool:
    return any(kind in kinds for kind in TRACED)


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
