"""Plans between real megatron-core and SGLang layouts: every rank's plan, every element.

The trainer's layouts are computed from its sizes; the engine's are traced. Elements are random bits, compared bitwise.
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

from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.offline.reshard_explain import make_scenario
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.analysis.traffic import compute_traffic, make_traffic_spec
from megarl.reshard.layout.layout import slices
from megarl.reshard.planning.lower_bounds import node_bounds, rank_bounds
from megarl.rollout.sglang.engine_environment import make_engine_environment
from megarl.rollout.sglang.weight_layout.trace_file import read_traces
from tests.reshard import simulate, traced
from tests.time_limits import HANG_SECONDS

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
    "rope_scaling": {  # SGLang requires it on CPU
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
MODELS = {  # vocabularies that both sides pad differently
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
    engines_to_trace = sorted({engine_of(case) for case in CASES.values()})
    files = {engine: folders / ("-".join(map(str, engine)) + ".npz") for engine in engines_to_trace}
    request = [[str(folders / model), *rest, str(files[model, *rest])] for model, *rest in engines_to_trace]
    child = subprocess.run(
        [sys.executable, str(Path(traced.__file__)), json.dumps(request)],
        env=os.environ | make_engine_environment("cpu", 4),
        capture_output=True,
        timeout=HANG_SECONDS,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return {engine: [trace.layout for trace in read_traces(file)] for engine, file in files.items()}


@pytest.fixture(scope="session")
def scenarios(folders, engines):
    def make(case):
        model, dtype = load_architecture_and_dtype(str(folders / case.model))
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
def test_every_element_arrives_exactly_once(scenarios, name):
    case = CASES[name]
    scenario = scenarios(case)
    arrangement = arrange(case.strategy, scenario)
    spec, topology = make_traffic_spec(arrangement, scenario), scenario.topology
    specs = scenario.sources[0].tensors
    rng = np.random.default_rng(len(name))
    whole = {n: rng.integers(1, 1 << 16, t.shape).astype(ELEMENTS[t.dtype]) for n, t in specs.items()}
    held = [local_tensors(layout, whole) for layout in spec.sources]
    targets = [local_tensors(spec.needs[rank]) if rank in spec.needs else {} for rank in range(len(held))]
    rounds = simulate.plans(spec.sources, spec.needs, topology, BUCKET, arrangement.groups, relay=spec.relay)
    assert len(rounds[0]) > 3
    messages = simulate.run(rounds, held, targets, arrangement.groups)
    for rank, need in spec.needs.items():
        assert {specs[p.tensor].dtype for p in need.pieces} == {need.tensors[p.tensor].dtype for p in need.pieces}
        expected = local_tensors(need, whole)
        assert all(np.array_equal(targets[rank][local], expected[local]) for local in expected)
    into_ranks, into_nodes = Counter(), Counter(dict.fromkeys(topology.nodes, 0))
    for source, to, num_bytes in messages:
        into_ranks[to] += num_bytes
        into_nodes[topology.nodes[to]] += 0 if topology.same_node(source, to) else num_bytes
    assert {rank: into_ranks[rank] for rank in spec.needs} == rank_bounds(spec.sources, spec.needs)
    traffic = compute_traffic(spec, arrangement.groups, topology)
    assert traffic.into_ranks == tuple(into_ranks[rank] for rank in range(len(held)))
    if traffic.into_nodes is not None:
        assert dict(into_nodes) == traffic.into_nodes
        if spec.relay:
            assert traffic.into_nodes == node_bounds(spec.sources, spec.needs, topology)


def local_tensors(layout, whole=None):
    """Return name -> local tensor of a process, sliced from the full tensors `whole`; zeros if `whole` is None."""
    shapes, dtypes = {}, {}
    for piece in layout.pieces:
        ends = [stop for _, stop in piece.local_box]
        shapes[piece.local] = [max(pair) for pair in zip(ends, shapes.get(piece.local, ends), strict=True)]
        dtypes[piece.local] = ELEMENTS[layout.tensors[piece.tensor].dtype]
    tensors = {local: np.zeros(shape, dtypes[local]) for local, shape in shapes.items()}
    for piece in layout.pieces if whole is not None else ():
        tensors[piece.local][slices(piece.local_box)] = whole[piece.tensor][slices(piece.box)]
    return tensors


def test_cases_have_the_stated_properties(scenarios):
    """Check the cases: keys on several ranks, differently padded vocabularies, mixed dtypes, and relays."""
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
