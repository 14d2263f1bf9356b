"""Rewards computed from a trajectory: rules for answers and formats, and Python functions of the user."""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.batch.trajectory import Prompt as Prompt
    from megarl.reward.math_equivalence import extract_final_answer as extract_final_answer
    from megarl.reward.terms import Completion as Completion
    from megarl.reward.terms import Term as Term
    from megarl.reward.terms import TermError as TermError
    from megarl.reward.terms import TermValue as TermValue
    from megarl.reward.terms import math_reward as math_reward
    from megarl.reward.terms import numeric_reward as numeric_reward

__all__ = [
    "Completion",
    "Prompt",
    "Term",
    "TermError",
    "TermValue",
    "extract_final_answer",
    "math_reward",
    "numeric_reward",
]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.batch.trajectory": ("Prompt",),
        "megarl.reward.math_equivalence": ("extract_final_answer",),
        "megarl.reward.terms": (
            "Completion",
            "Term",
            "TermError",
            "TermValue",
            "math_reward",
            "numeric_reward",
        ),
    },
)
