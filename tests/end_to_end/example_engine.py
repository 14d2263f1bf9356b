"""The engine of examples/custom-engine, under an import path that all processes of the tests have."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples/custom-engine"))

from transformers_engine import TransformersEngine

PATH = f"{__name__}:{TransformersEngine.__name__}"
