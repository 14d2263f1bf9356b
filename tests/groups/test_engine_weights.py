"""Pushes of several models to the same engines: who is connected, what is sent, and which models can be served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.groups.engine_weights import EngineWeights
from tests.groups.scripted_cluster import Cluster, make

__all__ = ["make"]

PROPOSER = {"name": "proposer", "head": "lm"}


def served_by(cluster: Cluster, trained: dict[str, Any], *, dedicated: frozenset[str] = frozenset()) -> EngineWeights:
    """Return the weights of the engines of `cluster`, whose ranks hold the policy and the trained models."""
    config: Any = SimpleNamespace(
        **{name: getattr(cluster.config, name) for name in ("weight_sync", "rollout", "disaggregated")},
        algorithm=SimpleNamespace(type="duel"),
        auxiliary_models=[SimpleNamespace(name=name, head=group.head) for name, group in trained.items()],
    )
    models: Any = SimpleNamespace(trained=trained, dedicated=dedicated)
    engines: Any = cluster
    return EngineWeights(config, engines, models, engines, cluster.pool)


class Other(Cluster):
    """The ranks of another model, which record their calls under their own name."""

    head = "lm"

    def begin_push(self, request: Any) -> Any:
        found = super().begin_push(request)
        self.calls[-1] = f"other {self.calls[-1]}"
        return found


def make_weights(make: Any, **weight_sync: Any) -> tuple[Cluster, EngineWeights]:
    cluster, _ = make(**weight_sync)
    other = Other()
    other.calls, other.heartbeats = cluster.calls, cluster.heartbeats
    weights = served_by(cluster, {"proposer": other})
    cluster.calls.clear()
    return cluster, weights


def pushes(cluster: Cluster) -> list[Any]:
    """Return the pushes and preparations of engine 0, in order."""
    kept = [call for call in cluster.calls if isinstance(call, str) or (call[0] == "prepare_boxes" and call[1] == 0)]
    return [call if isinstance(call, str) else call[0] for call in kept]


def test_engines_prepare_again_whenever_another_model_is_pushed(make: Any) -> None:
    cluster, weights = make_weights(make)
    weights.push(0)
    assert pushes(cluster) == ["push"], "the policy was connected before"
    assert weights.select("proposer")
    assert not weights.select("proposer")
    weights.push(0)
    assert weights.select(None)
    weights.push(1)
    weights.push(2)
    assert weights.select("proposer")
    weights.push(2)
    expected = ["push", "plan", "prepare_boxes", "other push", "prepare_boxes", "push", "push", "prepare_boxes"]
    assert pushes(cluster) == [*expected, "other push"], "the ranks of each model plan once"


def test_a_push_after_another_models_sends_all_weights(make: Any) -> None:
    cluster, weights = make_weights(make, delta=True)
    weights.push(0)
    weights.push(1)
    assert [delta.base is None for delta in cluster.deltas if delta] == [True, False]
    weights.select("proposer")
    weights.push(1)
    weights.select(None)
    weights.push(2)
    assert cluster.deltas[-1] is not None
    assert cluster.deltas[-1].base is None


def test_a_restarted_engine_receives_the_model_that_was_pushed_last(make: Any) -> None:
    cluster, weights = make_weights(make)
    weights.push(3)
    weights.select("proposer")
    weights.push(3)
    assert weights.policy_version == 3
    cluster.supervisor.ready = cluster.ready
    cluster.restart(1)
    cluster.calls.clear()
    cluster.supervisor.resync(1)
    assert [call for call in cluster.calls if isinstance(call, str)] == ["other push without [0]"]


@pytest.mark.parametrize(
    ("head", "dedicated", "model", "message"),
    [
        ("lm", frozenset(), "judge", "serve the model 'judge', which is none of the models that it trains"),
        ("value", frozenset(), "critic", "needs to be a language model, got one with the head 'value'"),
        ("lm", frozenset({"critic"}), "critic", r"placement.critic: .* needs the slots of the policy then, got a pool"),
    ],
)
def test_models_that_engines_cannot_serve_are_refused(
    make: Any, head: str, dedicated: frozenset[str], model: str, message: str
) -> None:
    cluster, _ = make()
    critic = Other()
    critic.head = head
    with pytest.raises(ConfigError, match=message):
        served_by(cluster, {"critic": critic}, dedicated=dedicated).select(model)
