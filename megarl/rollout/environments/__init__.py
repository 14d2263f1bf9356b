"""Environments that talk with the policy in messages: the interface, the agent that runs them, and those that ship."""

from typing import TYPE_CHECKING

from megarl.lazy_names import lazy_names

if TYPE_CHECKING:
    from megarl.rollout.environments.calculator import Calculator as Calculator
    from megarl.rollout.environments.environment import Environment as Environment
    from megarl.rollout.environments.environment import Message as Message
    from megarl.rollout.environments.environment import Step as Step
    from megarl.rollout.environments.environment import Task as Task
    from megarl.rollout.environments.guess import Guess as Guess
    from megarl.rollout.environments.http_tool import HttpTool as HttpTool
    from megarl.rollout.environments.python_interpreter import PythonInterpreter as PythonInterpreter
    from megarl.rollout.environments.search import Search as Search

__all__ = [
    "Calculator",
    "Environment",
    "Guess",
    "HttpTool",
    "Message",
    "PythonInterpreter",
    "Search",
    "Step",
    "Task",
]

__getattr__ = lazy_names(
    __name__,
    {
        "megarl.rollout.environments.calculator": ("Calculator",),
        "megarl.rollout.environments.environment": (
            "Environment",
            "Message",
            "Step",
            "Task",
        ),
        "megarl.rollout.environments.guess": ("Guess",),
        "megarl.rollout.environments.http_tool": ("HttpTool",),
        "megarl.rollout.environments.python_interpreter": ("PythonInterpreter",),
        "megarl.rollout.environments.search": ("Search",),
    },
)
