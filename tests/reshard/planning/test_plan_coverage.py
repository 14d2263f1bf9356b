"""From what megatron-core holds to what SGLang holds: real layouts on both sides, every rank's plan, every element.

The trainer's layouts follow from its sizes; the engine's are traced. Elements are random bits: equal means bitwise.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megarl.megatron.families.load_architecture import read_model
from megarl.offline.reshard_explain import make_scenario
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.analysis.traffic import find_traffic, wanted
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.lower_bounds import node_bounds, rank_bounds
from megarl.rollout.sglang.engine_environment import engine_environment
from megarl.rollout.sglang.weight_layout.trace_file import read_traces
from tests.reshard import simulate, traced

BUCKET = 12_000
ELEMENTS = {"bfloat16": np.uint16, "float32": np.uint32}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {  # which SGLang asks for on CPU
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}
MODELS = {  # vocabularies that both sides pad, and not alike
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 200, "tie_word_embeddings": True}),  # biased q, k, v
    "qwen3": (  # norms of queries and keys
        "Qwen3ForCausalLM",
        {"vocab_size": 300, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "hidden_size": 48},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "head_dim": 16, "decoder_sparse_step": 1} | EXPERTS,
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),  # the router's bias stays float32
}
SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    train: str
    gen: str
    device: str = "cuda"
    nodes: int = 1
    strategy: str = "exact"
    first_stage_layers: int | None = None


CASES = {
    "keys and values on several ranks, as t_g > t": Case(model="qwen2", train="tp=2,dp=2", gen="tp=4"),
    "tied embedding on the first and the last stage": Case(model="qwen2", train="pp=2,tp=2", gen="tp=2", device="cpu"),
    "tied embedding on an engine's two stages": Case(model="qwen2", train="pp=4", gen="pp=2,tp=2", device="cpu"),
    "relays of what several engine ranks hold": Case(model="qwen2", train="pp=2,tp=2,dp=2", gen="tp=4", nodes=2),
    "3 -> 2": Case(model="qwen3", train="tp=3,dp=2", gen="tp=2"),
    "micro-DP groups": Case(model="qwen3", train="tp=6,dp=2", gen="tp=2", nodes=2, strategy="micro_dp"),
    "micro-DP groups over stages": Case(model="qwen3", train="pp=2,tp=2,dp=2", gen="tp=2", strategy="micro_dp"),
    "interleaved chunks": Case(model="qwen3", train="pp=2,vpp=2,tp=2", gen="tp=2"),
    "interleaved chunks to an engine's stages": Case(model="qwen3", train="pp=2,vpp=2,tp=2", gen="pp=2,tp=1"),
    "relays between replicas": Case(model="qwen3", train="pp=2,tp=2,dp=2", gen="tp=2", nodes=2),
    "experts: ep 4, etp 1 -> ep 2, etp 2": Case(
        model="qwen3_moe", train="pp=2,tp=2,dp=2,ep=4,etp=1", gen="tp=4,ep=2", nodes=2
    ),
    "experts: ep 2, etp 2, tp 4 -> tp 2": Case(model="qwen3_moe", train="tp=4,dp=2,ep=2,etp=2", gen="tp=2", nodes=2),
    "experts outside of micro-DP groups": Case(
        model="qwen3_moe", train="tp=2,dp=4,ep=4,etp=1", gen="tp=2", nodes=2, strategy="micro_dp"
    ),
    "experts outside of training replicas": Case(
        model="qwen3_moe", train="tp=2,dp=2,ep=4,etp=1", gen="tp=2", strategy="hybridflow_v"
    ),
    "experts owned by all": Case(
        model="qwen3_moe", train="tp=2,dp=2,ep=2,etp=1", gen="tp=2", nodes=2, strategy="ds_chat"
    ),
    "latent attention, two dtypes": Case(
        model="deepseek_v3", train="pp=2,tp=2,dp=2,ep=4,etp=1", gen="tp=4,ep=2", nodes=2, first_stage_layers=2
    ),
    "latent attention, ep 2 -> ep 1": Case(
        model="deepseek_v3", train="pp=3,tp=2,dp=2,ep=2,etp=1", gen="tp=2", strategy="micro_dp", device="cpu"
    ),
}


def sizes(text):
    return {name: int(n) for name, n in (part.split("=") for part in text.split(","))}


def engine_of(case):
    gen = sizes(case.gen)
    return case.model, case.device, gen["tp"], gen.get("ep", 1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for model_type, (architecture, changes) in MODELS.items():
        (root / model_type).mkdir()
        config = {"model_type": model_type, "architectures": [architecture], "dtype": traced.DTYPE} | SIZES | changes
        (root / model_type / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="session")
def engines(folders):
    """(model, device, tp, ep) -> layouts by tensor rank."""
    wanted_engines = sorted({engine_of(case) for case in CASES.values()})
    files = {engine: folders / ("-".join(map(str, engine)) + ".npz") for engine in wanted_engines}
    request = [[str(folders / model), *rest, str(files[model, *rest])] for model, *rest in wanted_engines]
    child = subprocess.run(
        [sys.executable, str(Path(traced.__file__)), json.dumps(request)],
        env=os.environ | engine_environment("cpu", 4),
        capture_output=True,
        timeout=300,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return {engine: [trace.layout for trace in read_traces(file)] for engine, file in files.items()}


@pytest.fixture(scope="session")
def scenarios(folders, engines):
    def make(case):
        model, dtype = read_model(str(folders / case.model))
        assert dtype == traced.DTYPE
        return make_scenario(
            case.model,
            model,
            dtype,
            train=case.train,
            gen=case.gen,
            nodes=case.nodes,
            bucket_bytes=BUCKET,
            engine=lambda tp, _, *, ep: engines[case.model, case.device, tp, ep],
            first_stage_layers=case.first_stage_layers,
        )

    return make


@pytest.mark.parametrize("name", CASES)
def test_every_element_arrives_and_none_twice(scenarios, name):
    case = CASES[name]
    scenario = scenarios(case)
    arrangement = arrange(case.strategy, scenario)
    what, topology = wanted(arrangement, scenario), scenario.topology
    specs = scenario.sources[0].tensors
    rng = np.random.default_rng(len(name))
    whole = {n: rng.integers(1, 1 << 16, spec.shape).astype(ELEMENTS[spec.dtype]) for n, spec in specs.items()}
    held = [local_tensors(layout, whole) for layout in what.sources]
    targets = [local_tensors(what.needs[rank]) if rank in what.needs else {} for rank in range(len(held))]
    rounds = simulate.plans(what.sources, what.needs, topology, BUCKET, arrangement.groups, relay=what.relay)
    assert len(rounds[0]) > 3
    wire = simulate.run(rounds, held, targets, arrangement.groups)
    for rank, need in what.needs.items():
        assert {specs[p.tensor].dtype for p in need.pieces} == {need.tensors[p.tensor].dtype for p in need.pieces}
        expected = local_tensors(need, whole)
        assert all(np.array_equal(targets[rank][local], expected[local]) for local in expected)
    into_ranks, into_nodes = Counter(), Counter(dict.fromkeys(topology.nodes, 0))
    for source, to, num_bytes in wire:
        into_ranks[to] += num_bytes
        into_nodes[topology.nodes[to]] += 0 if topology.same_node(source, to) else num_bytes
    assert {rank: into_ranks[rank] for rank in what.needs} == rank_bounds(what.sources, what.needs)
    traffic = find_traffic(what, arrangement.groups, topology)
    assert traffic.into_ranks == tuple(into_ranks[rank] for rank in range(len(held)))
    if traffic.into_nodes is not None:
        assert dict(into_nodes) == traffic.into_nodes
        if what.relay:
            assert traffic.into_nodes == node_bounds(what.sources, what.needs, topology)


def local_tensors(layout, whole=None):
    """By local name, what a process holds; nothing that could be right where `whole` is not given."""
    shapes, dtypes = {}, {}
    for piece in layout.pieces:
        ends = [stop for _, stop in piece.local_box]
        shapes[piece.local] = [max(pair) for pair in zip(ends, shapes.get(piece.local, ends), strict=True)]
        dtypes[piece.local] = ELEMENTS[layout.tensors[piece.tensor].dtype]
    tensors = {local: np.zeros(shape, dtypes[local]) for local, shape in shapes.items()}
    for piece in layout.pieces if whole is not None else ():
        tensors[piece.local][slices(piece.local_box)] = whole[piece.tensor][slices(piece.box)]
    return tensors


def test_the_cases_are_what_they_say(scenarios):
    """Several ranks hold the same keys; vocabularies are padded by other amounts; dtypes are mixed; relays relay."""
    need = scenarios(CASES["keys and values on several ranks, as t_g > t"]).engine[0]
    keys = [[p.box[0] for p in layout.pieces if "layers.0.self_attn.k_proj.weight" in p.tensor] for layout in need]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    deepseek = scenarios(CASES["latent attention, two dtypes"])
    for side in (deepseek.sources[0], deepseek.engine[0][0]):
        assert {side.tensors[p.tensor].dtype for p in side.pieces} == {"bfloat16", "float32"}
    relays = scenarios(CASES["relays between replicas"])
    arrangement = arrange("exact", relays)
    rounds = simulate.plans(relays.sources, arrangement.needs, relays.topology, BUCKET)
    assert any(hop.receives for of_rank in rounds for this in of_rank for hop in this.hops[1:])
