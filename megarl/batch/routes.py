"""Routes: the experts that each token is sent to. Shapes: n tokens, L layers with experts, k experts of a token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Routes = np.ndarray
"""uint8 or uint16 [n, L, k]: the k experts of each of n tokens in each of L layers with experts; those of a token are k
times the same where they are not known."""

ROUTES = "routes"
"""Column of a request with routes instead of numbers; it is not an input of losses."""


def route_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """Return the type of routes of a model with this many experts per layer."""
    return np.uint8 if num_experts <= 256 else np.uint16


def join_routes(first: Routes | None, rest: Routes | None) -> Routes | None:
    """Return the routes of tokens and of those that follow them; None: of no tokens."""
    if first is None or rest is None:
        return rest if first is None else first
    return np.concatenate([first, rest])


def fit_routes(routes: Routes | None, num_tokens: int) -> Routes | None:
    """Return the routes of exactly this many tokens: those of others are left out, and unknown ones are zeros."""
    if routes is None:
        return None
    out = np.zeros((num_tokens, *routes.shape[1:]), routes.dtype)
    known = routes[:num_tokens]
    out[: len(known)] = known
    return out


def is_routed(routes: Routes) -> np.ndarray:
    """Return which tokens have routes in all layers, bool [n]."""
    known: np.ndarray = (routes[..., 0] != routes[..., 1]).all(axis=1)
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoutes:
    """How an engine returns the routes of a model: int32, of all layers."""

    num_layers: int
    layers: tuple[int, ...]
    """Indices, from 0, of the L layers with experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, has_experts: Sequence[bool], *, top_k: int, num_experts: int) -> EngineRoutes:
        """Return the form for a model; `has_experts`: of each layer."""
        layers = tuple(layer for layer, has in enumerate(has_experts) if has)
        return cls(num_layers=len(has_experts), layers=layers, top_k=top_k, num_experts=num_experts)

    def decode(self, encoded: str) -> Routes:
        """Return the routes of an answer of SGLang, `meta_info["routed_experts"]`; negative numbers are no experts."""
        found = np.frombuffer(base64.b64decode(encoded), np.int32).reshape(-1, self.num_layers, self.top_k)
        own = found[:, list(self.layers)]
        return np.where((own < 0).any(axis=(1, 2), keepdims=True), 0, own).astype(route_dtype(self.num_experts))
