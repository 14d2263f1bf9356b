"""From a configuration to what each GPU needs: placement, auxiliary models, pipeline stages and buckets."""

import json

import pytest

from benchmarks.reshard.published import QWEN3_8B
from megarl.config.preference import DpoConfig
from megarl.config.run import RunConfig, SftConfig
from megarl.device_memory.gpu_demand import gpu_demands, longest_sequence
from megarl.device_memory.gpus import NCCL_BYTES_PER_GROUP, gpu_memory

H100 = gpu_memory("h100-80")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-8b")
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(folder)


@pytest.fixture
def configure(model):
    """Function from a stage and its sections to a configuration with the 8B model on 8 GPUs."""

    def make(kind=RunConfig, **sections):
        placement = {"slots_per_node": 8} | sections.pop("placement", {})
        base = {"run_dir": "run", "model": {"path": model}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 1000}}
        return kind.model_validate(base | {"placement": placement} | sections)

    return make


def test_colocated(configure):
    (demand,) = gpu_demands(configure(rollout={"tp": 2, "replicas": 4}), H100)
    assert [model.name for model in demand.models] == ["policy", "reference"]
    policy, reference = demand.models
    assert policy.state.total == pytest.approx(61.5e9, rel=2e-3)
    assert reference.state.total == reference.state.parameters == policy.state.parameters
    assert (policy.is_trained, reference.is_trained, reference.offload_when_idle) == (True, False, True)
    assert demand.offload.optimizer
    assert demand.offload.gradients
    assert demand.releases_engine_memory
    assert demand.engine is not None
    assert demand.engine.weights == pytest.approx(8.19e9, rel=1e-3)
    assert (demand.nccl_bytes, demand.engine_nccl_bytes) == (NCCL_BYTES_PER_GROUP, NCCL_BYTES_PER_GROUP)
    assert demand.bucket_bytes == 2 * 256 * 2**20


def test_disaggregated(configure):
    placement = {"pools": {"b": {"slots_per_node": 4}}, "rollout": {"pool": "b"}}
    main, engines = gpu_demands(configure(placement=placement), H100)
    assert (main.pool, engines.pool) == ("main", "b")
    assert main.engine is None
    assert not main.offload.is_enabled
    assert engines.models == ()
    assert engines.engine is not None
    assert not engines.releases_engine_memory
    assert main.bucket_bytes == engines.bucket_bytes > 0


def test_every_combination_of_stages_is_planned(configure):
    """The policy has 4 stages on 8 GPUs, and the critic 2: four combinations."""
    algorithm = {"type": "ppo", "critic": {"parallel": {"pp": 2}}}
    demands = gpu_demands(configure(trainer={"parallel": {"pp": 4}}, algorithm=algorithm), H100)
    assert [demand.rank for demand in demands] == [0, 2, 4, 6]
    policies = [demand.models[0] for demand in demands]
    critics = [next(model for model in demand.models if model.name == "critic") for demand in demands]
    assert [policy.activations.head > 0 for policy in policies] == [False, False, False, True]
    assert critics[0] == critics[1] != critics[2] == critics[3]
    assert critics[3].activations.head < policies[3].activations.head  # one value per token instead of logits
    assert policies[0].state.total > policies[1].state.total  # the embedding
    assert policies[0].activations.stored == 4 * policies[3].activations.stored


def test_models_with_a_pool_of_their_own_stay_on_their_gpus(configure):
    placement = {"pools": {"c": {"slots_per_node": 8}}, "critic": {"pool": "c"}}
    algorithm = {"type": "ppo", "critic": {"optimizer": {"distributed": False}}}
    main, critics = gpu_demands(configure(placement=placement, algorithm=algorithm), H100)
    assert [model.name for model in main.models if model.is_trained] == ["policy"]
    (critic,) = critics.models
    assert (critic.name, critic.is_trained, critic.offload_when_idle) == ("critic", True, False)
    assert critics.bucket_bytes == 0
    assert critic.state.total == 9 * critic.state.parameters  # 18 bytes per parameter: an optimizer of its own


def test_the_longest_sequence_may_exceed_the_token_budget(configure):
    def stored(max_new_tokens, **trainer):
        config = configure(rollout={"max_new_tokens": max_new_tokens}, trainer=trainer)
        return gpu_demands(config, H100)[0].models[0].activations.stored

    assert longest_sequence(configure(rollout={"max_new_tokens": 3000})) == 4000
    assert stored(3000) == stored(3096) == stored(100)
    assert stored(7192) == 2 * stored(100)
    assert stored(7192, parallel={"cp": 2}) == stored(100)


def test_the_head_depends_on_how_it_is_computed(configure):
    def head(dtype="auto", fp32=False, **trainer):
        config = configure(trainer=trainer)
        model = config.model.model_copy(update={"dtype": dtype, "fp32_lm_head": fp32})
        return gpu_demands(config.model_copy(update={"model": model}), H100)[0].models[0].activations.head

    hidden, logits = 2 * 2 * 4096 * 4096, 4 * 4096 * 151936
    assert head() - hidden == int(0.1 * logits)
    assert head(fused_lm_head=False) - hidden == int(0.6 * logits)
    assert head(fused_lm_head=False, fp32=True) - hidden == int(1.2 * logits)


def test_full_tensors_need_larger_buckets(configure):
    config = configure(weight_sync={"strategy": "gather_hf", "bucket_bytes": 1000})
    assert gpu_demands(config, H100)[0].bucket_bytes == 3 * 2 * 151936 * 4096


def test_stages_without_engines(configure, model):
    (sft,) = gpu_demands(configure(SftConfig), H100)
    assert [each.name for each in sft.models] == ["policy"]
    assert sft.engine is None
    assert not sft.offload.is_enabled
    (dpo,) = gpu_demands(configure(DpoConfig, dpo={"reference": {"path": model}}), H100)
    assert [(each.name, each.is_trained) for each in dpo.models] == [("policy", True), ("reference", False)]
