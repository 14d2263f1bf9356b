"""Plans between real megatron-core and SGLang layouts: every rank's plan, every element.

The trainer's layouts are computed from its sizes; the engine's are traced. Elements are random bits, compared bitwise.
"""

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.reshard.full_gather import FULL_GATHERS, FullGather
from megarl.cli.tools.reshard_explain import make_scenario
from megarl.engines.sglang.weight_layout.offline_trace import trace_layouts
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.reshard.analysis.forecast import compute_traffic
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.lower_bounds import node_bounds, rank_bounds
from tests.engines.remote import fork_traces
from tests.megatron.fidelity.models import CONFIGS
from tests.reshard import simulate

BUCKET = 12_000
DTYPE = "bfloat16"
UNTIED = {"tie_word_embeddings": False, "intermediate_size": 96}
MODELS = {  # vocabularies that both sides pad differently
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2}),  # biases
    "qwen3": ("Qwen3ForCausalLM", UNTIED | {"vocab_size": 300, "num_attention_heads": 12, "num_key_value_heads": 6}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 4, "mlp_only_layers": []},
    ),
    "deepseek_v3": (  # the router's bias stays float32
        "DeepseekV3ForCausalLM",
        {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3},
    ),
    "gpt_oss": ("GptOssForCausalLM", {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 4}),
}


@dataclass(frozen=True)
class Case:
    model: str
    train: str
    gen: str
    nodes: int = 1
    strategy: str = "exact"
    device: str = "cuda"
    first_stage_layers: int | None = None


CASES = {
    "keys and values on several ranks, as t_g > t": Case("qwen2", "tp=2,dp=2", "tp=4"),
    "tied embedding on the first and the last stage": Case("qwen2", "pp=2,tp=2", "tp=2", device="cpu"),
    "relays of what several engine ranks hold": Case("qwen2", "pp=2,tp=2,dp=2", "tp=4", 2),
    "3 -> 2": Case("qwen3", "tp=3,dp=2", "tp=2"),
    "micro-DP groups": Case("qwen3", "tp=6,dp=2", "tp=2", 2, "micro_dp"),
    "micro-DP groups over stages": Case("qwen3", "pp=2,tp=2,dp=2", "tp=2", 1, "micro_dp"),
    "interleaved chunks": Case("qwen3", "pp=2,vpp=2,tp=2", "tp=2"),
    "interleaved chunks, t_g < t": Case("qwen3", "pp=2,vpp=2,tp=2", "tp=1"),
    "relays between replicas": Case("qwen3", "pp=2,tp=2,dp=2", "tp=2", 2),
    "experts: ep 4, etp 1 -> ep 2, etp 2": Case("qwen3_moe", "pp=2,tp=2,dp=2,ep=4,etp=1", "tp=4,ep=2", 2),
    "experts: ep 2, etp 2, tp 4 -> tp 2": Case("qwen3_moe", "tp=4,dp=2,ep=2,etp=2", "tp=2", 2),
    "experts outside of micro-DP groups": Case("qwen3_moe", "tp=2,dp=4,ep=4,etp=1", "tp=2", 2, "micro_dp"),
    "experts outside of training replicas": Case("qwen3_moe", "tp=2,dp=2,ep=4,etp=1", "tp=2", 1, "hybridflow_v"),
    "experts owned by all": Case("qwen3_moe", "tp=2,dp=2,ep=2,etp=1", "tp=2", 2, "ds_chat"),
    "latent attention, two dtypes": Case(
        "deepseek_v3", "pp=2,tp=2,dp=2,ep=4,etp=1", "tp=4,ep=2", 2, first_stage_layers=2
    ),
    "stacked experts, ep 2, etp 2 -> tp 4": Case("gpt_oss", "tp=4,dp=2,ep=2,etp=2", "tp=4", 2),
    "data-parallel attention, two groups": Case("deepseek_v3", "tp=2,dp=4,ep=4,etp=1", "tp=4,dp=2", 2),
    "data-parallel attention, each rank a group, ep 4": Case("deepseek_v3", "tp=2,dp=2,ep=2,etp=1", "tp=4,dp=4,ep=4"),
    "data-parallel attention, dense": Case("qwen2", "tp=2,dp=4", "tp=4,dp=2", 2),
    "data-parallel attention in micro-DP groups": Case("qwen3", "tp=6,dp=2", "tp=2,dp=2", 2, "micro_dp"),
    "latent attention, ep 2 -> ep 1": Case(
        "deepseek_v3", "pp=3,tp=2,dp=2,ep=2,etp=1", "tp=2", 1, "micro_dp", device="cpu"
    ),
}


def sizes(text):
    return {name: int(n) for name, n in (part.split("=") for part in text.split(","))}


def engine_of(case):
    gen = sizes(case.gen)
    return case.model, case.device, gen["tp"], gen.get("ep", 1), gen.get("dp", 1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for model_type, (architecture, changes) in MODELS.items():
        (root / model_type).mkdir()
        config = CONFIGS[model_type] | {"architectures": [architecture], "dtype": DTYPE} | changes
        (root / model_type / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="session")
def engines(folders):
    """(model, device, tp, ep, dp) -> layouts by tensor rank."""
    layouts = {}
    with pytest.MonkeyPatch.context() as patch:
        fork_traces(patch)
        patch.setenv("XDG_CACHE_HOME", str(folders))
        for engine in {engine_of(case) for case in CASES.values()}:
            model, device, tp, ep, dp = engine
            sizes = {"tp": tp, "ep": ep, "options": {"attn_dp_size": dp}}
            layouts[engine] = trace_layouts(str(folders / model), device=device, dtype=DTYPE, **sizes)
    return layouts


@pytest.fixture(scope="session")
def scenarios(folders, engines):
    def make(case):
        model, dtype = load_architecture_and_dtype(str(folders / case.model))
        assert dtype == DTYPE
        return make_scenario(
            case.model,
            model,
            dtype,
            train=case.train,
            gen=case.gen,
            nodes=case.nodes,
            bucket_bytes=BUCKET,
            engine=lambda tp, _, *, ep, dp: engines[case.model, case.device, tp, ep, dp],
            first_stage_layers=case.first_stage_layers,
        )

    return make


@pytest.mark.parametrize("name", CASES)
def test_every_element_arrives_exactly_once(scenarios, name):
    case = CASES[name]
    scenario = scenarios(case)
    if case.strategy in FULL_GATHERS:
        gather = FullGather(case.strategy, scenario)
        arrangement, scenario = gather.gather, gather.gather_scenario
    else:
        arrangement = arrange(case.strategy, scenario)
    sources, needs, topology = scenario.sources, arrangement.needs, scenario.topology
    specs = sources[0].tensors
    whole, held, targets = simulate.make_tensors(sources, needs, len(name))
    rounds = simulate.plans(sources, needs, topology, BUCKET, arrangement.groups)
    assert len(rounds[0]) > 3
    messages = simulate.run(rounds, held, targets, arrangement.groups)
    for rank, need in needs.items():
        assert {specs[p.tensor].dtype for p in need.pieces} == {need.tensors[p.tensor].dtype for p in need.pieces}
        expected = simulate.local_tensors(need, whole)
        assert all(np.array_equal(targets[rank][local], expected[local]) for local in expected)
    into_ranks = Counter()
    for _, to, num_bytes in messages:
        into_ranks[to] += num_bytes
    assert {rank: into_ranks[rank] for rank in needs} == rank_bounds(sources, needs)
    traffic = compute_traffic(sources, needs, arrangement.groups, topology)
    assert traffic.into_ranks == tuple(into_ranks[rank] for rank in range(len(held)))
    if traffic.into_nodes is not None:
        assert simulate.bytes_into_nodes(messages, topology) == traffic.into_nodes
        assert traffic.into_nodes == node_bounds(sources, needs, topology)


def test_cases_have_the_stated_properties(scenarios):
    """Check the cases: keys on several ranks, differently padded vocabularies, mixed dtypes, and relays."""
    need = scenarios(CASES["keys and values on several ranks, as t_g > t"]).engine
    keys = [[p.box[0] for p in layout.pieces if "layers.0.self_attn.k_proj.weight" in p.tensor] for layout in need]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    deepseek = scenarios(CASES["latent attention, two dtypes"])
    for side in (deepseek.sources[0], deepseek.engine[0]):
        assert {side.tensors[p.tensor].dtype for p in side.pieces} == {"bfloat16", "float32"}
    relays = scenarios(CASES["relays between replicas"])
    arrangement = arrange("exact", relays)
    rounds = simulate.plans(relays.sources, arrangement.needs, relays.topology, BUCKET)
    assert any(hop.receives for of_rank in rounds for this in of_rank for hop in this.hops[1:])
