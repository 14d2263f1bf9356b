"""Public names of a package that are imported when they are first used (PEP 562).

if TYPE_CHECKING:
from megarl.batch.trajectory import Trajectory as Trajectory  # for type checkers and the documentation

__all__ = ["Trajectory"]
__getattr__ = lazy_names(__name__, {"megarl.batch.trajectory": ("Trajectory",)})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, Sequence[str]], **modules: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`.

    Args:
        names: by module, the names that are imported from it.
        modules: by name, the modules that are imported under other names.
    """
    places = {name: module for module, of_module in names.items() for name in of_module}

    def get(name: str) -> Any:
        if name in modules:
            value: Any = import_module(modules[name])
        elif name in places:
            value = getattr(import_module(places[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get
