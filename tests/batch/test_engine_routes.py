"""Routes as SGLang returns them: layers with experts, size of numbers, tokens without a route."""

import base64

import numpy as np
import pytest

from megarl.batch.trajectory import EngineRoutes, fit_routes, is_routed, join_routes


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16)])
def test_routes_of_layers_with_experts_are_kept_in_as_few_bytes_as_they_need(num_experts, dtype):
    has_experts = [False, True, True, False, True]
    found = np.random.default_rng(0).integers(0, num_experts, (7, 5, 2)).astype(np.int32)
    found[..., 1] = (found[..., 0] + 1) % num_experts
    routes = EngineRoutes.of(has_experts, top_k=2, num_experts=num_experts).decode(base64.b64encode(found).decode())
    assert routes.dtype == dtype
    assert np.array_equal(routes, found[:, [1, 2, 4]])
    assert is_routed(routes).all()


def test_tokens_that_the_engine_has_not_routed_in_all_layers_have_no_route():
    found = np.tile(np.array([3, 1], np.int32), (4, 2, 1))
    found[1, 1] = -1
    found[2, 0] = 0
    routes = EngineRoutes.of([True, True], top_k=2, num_experts=8).decode(base64.b64encode(found).decode())
    assert is_routed(routes).tolist() == [True, False, False, True]


def test_routes_fit_the_tokens_of_a_trajectory():
    routes = np.array([[[1, 2]], [[3, 4]], [[5, 6]]], np.uint8)
    assert np.array_equal(join_routes(routes[:1], routes[1:]), routes)
    assert join_routes(None, routes) is routes
    assert join_routes(routes, None) is routes
    assert np.array_equal(fit_routes(routes, 2), routes[:2])
    assert is_routed(fit_routes(routes, 5)).tolist() == [True] * 3 + [False] * 2
    assert fit_routes(None, 5) is None
