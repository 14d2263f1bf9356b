"""Auxiliary models in real processes: two steps of PPO with scripted rollouts instead of engines."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from ray.util import remove_placement_group
from safetensors.torch import load_file
from torch import Tensor

from megarl.cluster.placement.pool import reserve_pools
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.run.remote.build import trainer_spec
from megarl.run.remote.trainer_group import AuxiliaryModels, auxiliary_spec, make_rank_processes, make_trainer_group
from megarl.run.rollout_batch import RolloutBatch
from megarl.tracking.progress import EventLog
from tests.algorithms.scripted_run import FakeRolloutGroup, train_with_fakes
from tests.megatron.fidelity.models import save_model, save_value_model
from tests.megatron.fidelity.reference import _load
from tests.run.finished_groups import completion, finished_group, run_config
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS

STEPS, PROMPTS, SAMPLES = 2, 2, 4
VARYING = ("time/", "controller/", "tokens_per_second")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Results of two training steps."""

    grids: dict[str, RankGrid]
    dedicated: set[str]  # models that do not share the trainer's processes
    metrics: list[dict[str, float]]  # of each step, without timings
    values: dict[tuple[int, int], Any]  # of the critic for `GROUP` before training
    weights: dict[str, dict[str, Tensor]]  # of policy and critic after training, exported, by model and tensor name


def sample_length(sample):
    return 3 + 4 * sample


def reward(label, number, sample):
    return float((number + sample) % 3 == 0)


GROUP = [completion([0] + [1] * sample_length(sample)) for sample in range(SAMPLES)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "models"
    return {"policy": save_model("qwen3", root), "critic": save_value_model("qwen2", root)}


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory, folders):
    """Return a function that runs two steps once per placement and layout of the critic, and then frees the slots."""

    @cache
    def run_once(*, offload=False, dedicated=False, tp=1):
        folder = tmp_path_factory.mktemp("roles")
        placement = {"slots_per_node": 2, "offload_idle_models": offload, "start_timeout_seconds": UNREACHED_SECONDS}
        if dedicated:
            placement |= {"pools": {"elsewhere": {"slots_per_node": 2}}, "critic": {"pool": "elsewhere"}}
        trainer = {"steps": STEPS, "optimizer": {"lr": 1e-2}}
        sizes = {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "num_mini_batches": 2}
        critic = {"path": folders["critic"], "parallel": {"tp": tp}, "optimizer": {"lr": 1e-2}}
        config = run_config(
            {"type": "ppo", **sizes, "kl_reward": {"coefficient": 0.05}, "critic": critic},
            run_dir=str(folder / "run"),
            model={"path": folders["policy"]},
            data={"path": "data.jsonl", "shuffle": False},
            trainer=trainer | {"max_tokens_per_micro_batch": 30, "timeout_seconds": UNREACHED_SECONDS},
            tracking={"tensorboard": False, "rollouts": False},
            limits={"logprob_kl": None, "logprob_abs_p99": None},  # no engine has computed the log-probabilities
            placement=placement,
        )
        return run_two_steps(config, folder)

    return run_once


def run_two_steps(config, folder):
    pools = reserve_pools(config.placement, config.placement.all_pools)
    processes = make_rank_processes(pools["main"], "trainer")
    processes_by_role = {"policy": processes}
    try:
        trainer = make_trainer_group(config, processes)
        models, starting = AuxiliaryModels.start(config, processes, pools)
        groups = {"policy": trainer, **models.trained, **models.frozen}
        processes_by_role = {name: group.group._processes for name, group in groups.items()}
        for pending in [*starting, trainer.start_workers(trainer_spec(config))]:
            pending.result(HANG_SECONDS)
        experience = RolloutBatch(groups=[finished_group(GROUP)])
        (found,) = map(dict, models.trained["critic"].values(experience.forward_request(config)).fetch()[:1])
        log, weights = [], {}
        rollouts = FakeRolloutGroup(reward, log, sample_length)
        metrics = train_with_fakes(config, trainer, models, rollouts, log, EventLog()).metrics
        for name in ("policy", "critic"):
            groups[name].save_hf(str(folder / name))
            weights[name] = load_file(folder / name / "model.safetensors")
        return RunResult(
            grids={name: group.grid for name, group in groups.items()},
            dedicated={name for name, each in processes_by_role.items() if each is not processes},
            metrics=[{k: v for k, v in row.items() if not k.startswith(VARYING)} for row in metrics],
            values=found,
            weights=weights,
        )
    finally:
        for each in {id(each): each for each in processes_by_role.values()}.values():
            each.stop()
            remove_placement_group(each.pool.group)


def test_critic_with_another_layout_shares_the_trainer_processes(run, folders):
    ran = run(tp=2)
    sizes = {name: (grid.dp, grid.tp) for name, grid in ran.grids.items()}
    assert sizes == {"policy": (2, 1), "critic": (1, 2), "reference": (2, 1)}
    assert ran.dedicated == set()
    want = compute_transformers_values(folders["critic"])
    assert ran.values.keys() == {(0, i) for i in range(SAMPLES)}
    for (_, i), values in ran.values.items():
        assert values[0] == 0
        assert values[1:] == pytest.approx(want[i][:-1], abs=1e-5)
    for name in ("policy", "critic"):
        disk = load_file(f"{folders[name]}/model.safetensors")
        moved = [key for key, tensor in disk.items() if not torch.equal(tensor, ran.weights[name][key])]
        assert len(moved) > len(disk) / 2, name
    first, second = ran.metrics
    assert abs(first["kl/reference"]) < 1e-5 < abs(second["kl/reference"])
    assert first["train_infer_mismatch/logprob_abs_max"] > 0
    assert first["critic/loss"] != second["critic/loss"]


def compute_transformers_values(folder):
    from transformers import AutoModelForSequenceClassification

    model = _load(folder, AutoModelForSequenceClassification)
    ids = [torch.from_numpy(trajectory.token_ids).long()[None] for trajectory in GROUP]
    with torch.no_grad():
        return [model.score(model.model(each).last_hidden_state)[0, :, 0].tolist() for each in ids]


def assert_identical(a, b):
    assert a.metrics == b.metrics
    for name in ("policy", "critic"):
        ours, theirs = a.weights[name], b.weights[name]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32)) for key in ours)


def test_offloaded_idle_models_give_identical_results(run):
    assert_identical(run(tp=2, offload=True), run(tp=2))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_critic_on_dedicated_slots_gives_identical_results(tp, run):
    dedicated = run(tp=tp, dedicated=True)
    assert dedicated.dedicated == {"critic"}
    assert_identical(dedicated, run(tp=tp))


@pytest.mark.parametrize(
    ("device", "offload_idle_models", "want"),
    [("cuda", None, True), ("cpu", None, False), ("cpu", True, True), ("cuda", False, False)],
)
def test_models_are_offloaded_only_on_shared_slots(device, offload_idle_models, want):
    pool = {"pools": {"elsewhere": {}}, "critic": {"pool": "elsewhere"}}
    config = run_config({"type": "ppo"}, placement={**pool, "offload_idle_models": offload_idle_models})
    found = {each.name: auxiliary_spec(config, each, device).offload_when_idle for each in config.auxiliary_models}
    assert found == {"reference": want, "critic": False}


@pytest.mark.parametrize(
    ("algorithm", "policy", "critic"),
    [
        ({"type": "grpo", "num_mini_batches": 2}, 20, 20),
        ({"type": "ppo", "critic": {"warmup_steps": 3}, "ppo_epochs": 2, "num_mini_batches": 1}, 14, 20),
        ({"type": "vapo", "pretraining": {"max_steps": 4}, "num_mini_batches": 1}, 10, 14),
    ],
)
def test_schedules_count_the_updates_of_each_model(algorithm, policy, critic):
    config = run_config(algorithm, trainer={"steps": 10})
    assert (config.policy_updates, config.auxiliary_updates) == (policy, critic)


def test_all_language_models_have_the_same_head():
    config = run_config({"type": "ppo"}, trainer={"fused_lm_head": True})
    config = config.model_copy(update={"model": config.model.model_copy(update={"fp32_lm_head": True})})
    specs = [trainer_spec(config).model, *(auxiliary_spec(config, each, "cpu") for each in config.auxiliary_models)]
    heads = [(spec.head, spec.fused_lm_head, spec.fp32_lm_head) for spec in specs]
    assert heads == [(head, True, True) for head in ("lm", "lm", "value")]
