"""How an environment is loaded from the import path in its section of the configuration."""

from __future__ import annotations

import inspect
import weakref
from contextlib import suppress
from typing import cast

from megarl.config.import_path import load_object
from megarl.config.rollout import EnvironmentConfig
from megarl.errors import AgentError, ConfigError
from megarl.rollout.environments.environment import Environment

ENV = "rollout.env"
"""YAML key of the environment of all sources that have none of their own."""

METHODS = {"reset": 1, "step": 1, "close": 0}
"""Methods of an environment, and the number of their arguments."""

CHECK = "check_settings"
"""Optional static method of an environment that takes its keyword arguments before a run begins, and raises a
`ConfigError` if no episode could start with them."""


def check_environment(config: EnvironmentConfig, key: str = ENV) -> type:
    """Import the class of the environment and return it after checking its methods; no object is created.

    Args:
        key: YAML key of the section.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or does not take the keyword arguments, or its
            `check_settings` refuses them.
    """
    found = load_object(config.path, key=f"{key}.path", kind="Environment")
    if not isinstance(found, type):
        raise ConfigError(
            f"{key}.path needs a class, one object of which is created for each episode, got {config.path}, an object "
            f"of type {type(found).__name__}"
        )
    for name, num_arguments in METHODS.items():
        method = getattr(found, name, None)
        if not callable(method):
            raise ConfigError(
                f"{key}.path needs a class with the methods {', '.join(METHODS)}, {config.path} has no {name}"
            )
        try:
            inspect.signature(method).bind(*[None] * (num_arguments + 1))
        except TypeError as e:
            raise ConfigError(
                f"{key}.path: {config.path}.{name}{inspect.signature(method)} needs to take {num_arguments} arguments: "
                f"{e}"
            ) from e
    try:
        inspect.signature(found).bind(**config.kwargs)
    except TypeError as e:
        raise ConfigError(
            f"{key}.kwargs: {config.path}{inspect.signature(found)} does not take these arguments: {e}"
        ) from e
    if isinstance(inspect.getattr_static(found, CHECK, None), staticmethod):
        getattr(found, CHECK)(**config.kwargs)
    return found


class EnvironmentFactory:
    """Creates an environment for each episode."""

    def __init__(self, config: EnvironmentConfig, key: str = ENV) -> None:
        """Import the class; arguments and errors as for `check_environment`."""
        self._config, self._key, self._class = config, key, check_environment(config, key)
        self._used: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def create(self) -> Environment:
        """Return a new object.

        Raises:
            AgentError: it is that of another episode.
        """
        found = self._class(**self._config.kwargs)
        if self._used.get(id(found)) is found:
            raise AgentError(
                f"{self._key}.path needs a new object for each episode, {self._config.path} returned that of another "
                "episode"
            )
        with suppress(TypeError):  # a class with slots that has no weak references cannot be checked
            self._used[id(found)] = found
        return cast("Environment", found)
