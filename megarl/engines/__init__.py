"""Generation engines: SGLang on GPU and CPU, and what an engine outside the package is written with.

Such an engine is named by `rollout.engine.type: package.module:Class`.
"""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.engines.custom_engine import Engine as Engine
    from megarl.engines.engine import Generation as Generation
    from megarl.engines.engine import GenerationRequest as GenerationRequest
    from megarl.engines.engine import Sampling as Sampling
    from megarl.engines.engine_spec import EngineSpec as EngineSpec

__all__ = ["Engine", "EngineSpec", "Generation", "GenerationRequest", "Sampling"]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.engines.custom_engine": ("Engine",),
        "megarl.engines.engine": ("Generation", "GenerationRequest", "Sampling"),
        "megarl.engines.engine_spec": ("EngineSpec",),
    },
)
