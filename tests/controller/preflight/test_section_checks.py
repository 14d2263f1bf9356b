"""Checks of single sections: what runs an episode, schedules, and `trainer.megatron` and `trainer.moe`.

The last run says which lookahead and cap an asynchronous schedule needs. The weight sync of a configuration is
simulated under NCCL's rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.cluster.placement.assign import planned_nodes
from megarl.config import RunConfig, SftConfig
from megarl.config.rollout import RolloutConfig
from megarl.controller.preflight import weight_sync_checks
from megarl.controller.preflight.machine_checks import find_schedule_problems
from megarl.controller.preflight.model_checks import (
    describe_megatron,
    find_engine_size_problems,
    find_gather_problems,
    find_megatron_problems,
)
from megarl.controller.preflight.run_checks import (
    MIN_OBSERVED_STEPS,
    check_run,
    find_agent_problems,
    find_schedule_notices,
)
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.megatron.families.load_architecture import load_architecture
from megarl.reshard.analysis import nccl_progress
from megarl.reshard.analysis.nccl_progress import PostedGroup
from megarl.reshard.planning.rounds import Round
from megarl.sandbox import tiers
from tests.cli.tiny_run import write_config, write_tiny_run
from tests.config.runs import REQUIRED, flow, has_parts
from tests.errors import expect_error
from tests.megatron.families.tiny import DEEPSEEK_V3, QWEN3_MOE
from tests.megatron.fidelity.models import CONFIGS
from tests.rollout.environments.chat_templates import STRIPS_THOUGHTS, chat_tokenizer
from tests.run.finished_groups import run_config

CALCULATOR = {"path": "megarl.rollout.environments.calculator:Calculator"}
GAME = {"terms": {"game": {"type": "environment"}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models: `chat`, `plain` without a chat template, and `thoughts`, whose template strips thoughts."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("chat", "plain", "thoughts"):
        write_tiny_model(folder / name, ["some text"], seed=0, chat=name == "chat")
    chat_tokenizer(STRIPS_THOUGHTS).save_pretrained(folder / "thoughts")
    return folder


def problems(folder: Path, *, env: dict[str, Any] | None = CALCULATOR, **sections: Any) -> list[str]:
    tree = {"model": {"path": str(folder)}, "reward": GAME, "rollout": {"env": env}} | sections
    return list(find_agent_problems(run_config(tree.pop("algorithm", {"type": "grpo"}), **tree)))


def test_an_environment_with_a_chat_template_has_no_problems(models: Path) -> None:
    assert problems(models / "chat") == []
    assert problems(models / "chat", algorithm={"type": "gspo", "advantages_per": "turn"}) == []
    assert problems(models / "thoughts", env={**CALCULATOR, "forks": "allow"}) == []


def test_a_sandbox_that_an_environment_needs_is_checked(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(**sandbox: Any) -> dict[str, Any]:
        path = "megarl.rollout.environments.python_interpreter:PythonInterpreter"
        return {"path": path, "kwargs": {"sandbox": sandbox}}

    monkeypatch.setattr(tiers, "find_tier_problem", lambda tier: None if tier == "bubblewrap" else "not installed")
    assert problems(models / "chat", env=python()) == []
    (unknown,) = problems(models / "chat", env=python(wall=1))
    assert unknown == "rollout.env.kwargs.sandbox.wall: Extra inputs are not permitted"
    (missing,) = problems(models / "chat", env=python(tier="launcher"))
    start = "rollout.env.kwargs.sandbox needs a sandbox that works on this machine, or allow_unsafe: "
    assert has_parts(missing, f"{start} ... got none (launcher: not installed)")


def test_each_setting_that_cannot_work_is_one_sentence(models: Path) -> None:
    (missing,) = problems(models / "plain")
    assert missing.startswith("rollout.env needs a tokenizer with a chat template, that of ")
    (rewriting,) = problems(models / "thoughts")
    assert rewriting.startswith("rollout.env.forks: forbid needs a chat template that only appends to a conversation")
    (forks,) = problems(models / "chat", env={**CALCULATOR, "forks": "allow"}, algorithm={"type": "gspo"})
    reason = "algorithm.type: gspo computes importance ratios over whole sequences"
    assert forks == f"rollout.env.forks needs to be forbid, got allow: {reason}"
    (unused,) = problems(models / "chat", env=None)
    source = "rollout.env, or an agent or harness that gives rewards of turns"
    assert unused == f"reward.terms.game is of type environment, which needs {source}"
    per_turn = {"type": "grpo", "advantages_per": "turn"}
    (turns,) = problems(models / "chat", algorithm=per_turn, reward={"terms": {"match": {"type": "numeric"}}})
    term = "a term of type environment in reward.terms, which adds up the rewards of turns, got match"
    assert turns == f"algorithm.advantages_per: turn needs {term}"
    (path,) = problems(models / "chat", env={"path": "nowhere:Nothing"})
    assert path.startswith("rollout.env.path: cannot import nowhere")
    (never,) = problems(models / "chat", data={"path": "d.jsonl", "chat_template": "never"})
    assert never == "rollout.env needs a chat template, got data.chat_template: never"


def test_environments_of_sources_are_named_by_their_keys(models: Path) -> None:
    def sources(**games: Any) -> dict[str, Any]:
        plain = {"path": "a.jsonl", "ratio": 0.5, "reward_terms": ["match"]}
        return {"sources": {"math": plain, "games": {"path": "b.jsonl", "ratio": 0.5, "env": CALCULATOR, **games}}}

    reward = {"terms": {"match": {"type": "numeric"}, **GAME["terms"]}}
    assert problems(models / "chat", env=None, data=sources(), reward=reward) == []
    (path,) = problems(models / "chat", env=None, data=sources(env={"path": "nowhere:Nothing"}), reward=reward)
    assert path.startswith("data.sources.games.env.path: cannot import nowhere")
    (never,) = problems(models / "chat", env=None, data=sources(chat_template="never"), reward=reward)
    assert never == "data.sources.games.env needs a chat template, got data.sources.games.chat_template: never"
    (missing,) = problems(models / "plain", env=None, data=sources(), reward=reward)
    assert missing.startswith("data.sources.games.env needs a tokenizer with a chat template, that of ")


def test_each_setting_of_a_harness_that_cannot_work_is_one_sentence(models: Path) -> None:
    def found(model: str, algorithm: str = "grpo", **harness: Any) -> list[str]:
        sections = {"rollout": {"harness": {"command": ["python3"], **harness}}, "algorithm": {"type": algorithm}}
        return problems(models / model, **sections)

    assert found("chat") == found("thoughts") == found("chat", "gspo", forks="forbid") == []
    (missing,) = found("plain")
    assert missing.startswith("rollout.harness needs a tokenizer with a chat template, that of ")
    (forks,) = found("chat", "gspo")
    assert forks.startswith("rollout.harness.forks needs to be forbid, got allow: algorithm.type: gspo computes")
    (rewriting,) = found("thoughts", forks="forbid")
    assert rewriting.startswith("rollout.harness.forks: forbid needs a chat template that only appends")
    (program,) = found("chat", command=["no-such-program-1"])
    assert program == "rollout.harness.command: the program 'no-such-program-1' was not found on this node"


POOLS = {"pools": {"engines": {}}, "rollout": {"pool": "engines"}}
MODEL_TERM = {"terms": {"match": {"type": "numeric"}, "judge": {"type": "model", "path": "judge"}}}


def schedule_problems(device: str | None = "cpu", *, algorithm: Any = None, **sections: Any) -> list[str]:
    return list(find_schedule_problems(run_config(algorithm or {}, **sections), device))


def test_engines_without_memory_cannot_drain() -> None:
    assert schedule_problems("cuda") == []
    drains = {"type": "one_step_off"}
    (problem,) = schedule_problems("cuda", schedule=drains)
    assert problem.startswith("schedule.update: drain waits for requests")
    assert schedule_problems("cpu", schedule=drains) == schedule_problems(None, schedule=drains) == []
    assert schedule_problems("cuda", schedule={"type": "async"}) == []
    assert schedule_problems("cuda", schedule=drains, placement=POOLS) == []


def test_engines_that_release_their_memory_cannot_be_updated_in_place() -> None:
    for update in ("in_place", "abort", "retract"):
        assert schedule_problems(schedule={"type": "async", "update": update}) == []
    in_place = {"type": "async", "update": "in_place"}
    (problem,) = schedule_problems("cuda", schedule=in_place)
    assert problem.startswith("schedule.update: in_place keeps the KV cache of running requests")
    assert schedule_problems("cuda", schedule=in_place, placement=POOLS) == []
    assert schedule_problems("cuda", schedule={"type": "async", "update": "abort"}) == []


@pytest.mark.parametrize("algorithm", ["dapo", "prime"])
def test_models_cannot_filter_groups(algorithm: str) -> None:
    (problem,) = schedule_problems(algorithm={"type": algorithm}, reward=MODEL_TERM, schedule={"type": "async"})
    assert "reward.terms.judge is a model" in problem
    assert schedule_problems(algorithm={"type": algorithm}, schedule={"type": "async"}) == []
    assert schedule_problems(algorithm={"type": "grpo"}, reward=MODEL_TERM, schedule={"type": "async"}) == []


def write_metrics(folder: Path, steps: int) -> None:
    """Write metrics of a run whose groups take 10 s on average and 45 s at most, and whose training takes 8 s."""
    rows: list[dict[str, float]] = [{"step": 0, "eval/match": 0.5}]
    for step in range(1, steps + 1):
        slowest = 145.0 if step == 1 else 45.0  # the first one warms up
        generation = {"generation_seconds_mean": slowest - 35.0, "generation_seconds_max": slowest}
        rows.append({"step": step, "loss": 0.0, "time/rollout_seconds": slowest, "time/step_seconds": slowest + 8.0})
        rows[-1] |= {f"rollout/{name}": value for name, value in generation.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_run_says_what_an_asynchronous_one_needs(tmp_path: Path) -> None:
    write_metrics(tmp_path, 10)
    expected = (
        f"the last run in {tmp_path}: groups take 1.00 steps on average and 4.50 at most: asynchronous steps need "
        "lookahead 2 and max_staleness 5"
    )
    assert list(find_schedule_notices(run_config({}, run_dir=str(tmp_path)))) == [expected]
    narrow = {"type": "async", "lookahead": 1, "max_staleness": 2}
    first, *warnings = find_schedule_notices(run_config({}, run_dir=str(tmp_path), schedule=narrow))
    assert first == expected
    assert [warning.partition(" ")[0] for warning in warnings] == ["schedule.lookahead", "schedule.max_staleness"]


def test_a_short_run_says_nothing(tmp_path: Path) -> None:
    config = run_config({}, run_dir=str(tmp_path))
    assert list(find_schedule_notices(config)) == []
    write_metrics(tmp_path, MIN_OBSERVED_STEPS)
    assert list(find_schedule_notices(config)) == []


def test_unbounded_weights_are_noted(tmp_path: Path) -> None:
    def notices(kind: str, cap: float | None) -> list[str]:
        algorithm = {"type": "grpo", "decoupled": {"behave_cap": cap}}
        return list(find_schedule_notices(run_config(algorithm, run_dir=str(tmp_path), schedule={"type": kind})))

    (notice,) = notices("async", None)
    assert notice.startswith("algorithm.decoupled.behave_cap: null does not bound")
    assert notices("async", 2.0) == notices("sync", None) == []


GEMMA2 = CONFIGS["gemma2"] | {"architectures": ["Gemma2ForCausalLM"]}
QWEN3 = CONFIGS["qwen3"] | {"architectures": ["Qwen3ForCausalLM"]}
MODEL = "trainer.megatron.model"
CP = f"{MODEL}.cp_comm_type"
UNFUSED = "no fused kernel fits the layers of"
HEADS = "a2a divides the key-value heads of a tensor-parallel rank"

FUSED_ROPE = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16} | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
}
"""Latent attention that has a fused kernel for RoPE: YaRN on sizes that Triton can index."""


def megatron_problems(hf_config: Any, device: str = "cuda", *, dtype: str = "auto", **trainer: Any) -> list[str]:
    placement = {"slots_per_node": 8 if trainer.get("parallel") else 1}
    tree = REQUIRED | {"model": {"path": "m", "dtype": dtype}, "placement": placement, "trainer": trainer}
    config = SftConfig.model_validate(tree)
    return list(find_megatron_problems(config, load_architecture(hf_config, origin="config.json"), device))


def model(**fields: Any) -> dict[str, Any]:
    return {"megatron": {"model": fields}}


def comm_type(kind: str | list[str], **parallel: int) -> dict[str, Any]:
    return model(cp_comm_type=kind) | {"parallel": {"cp": 2, **parallel}}


FP8 = model(fp8="hybrid", fp8_recipe="blockwise")
QWEN3_5 = CONFIGS["qwen3_5"] | {"architectures": ["Qwen3_5ForCausalLM"]}
UNPACKED = "megatron-core has none for packed sequences in gated delta nets, which Qwen3_5ForCausalLM has"
ENGINE = "rollout.engine.extra_args"
WHOLE = "the routers of Qwen3MoeForCausalLM need whole micro-batches"


@pytest.mark.parametrize(
    ("hf_config", "trainer", "want"),
    [
        (QWEN3, FP8, []),
        (QWEN3, FP8 | {"dtype": "float32"}, [f"{MODEL}.fp8: needs model.dtype: bfloat16, got float32"]),
        (QWEN3, model(transformer_impl="local"), []),
        (
            QWEN3,
            model(transformer_impl="local", attention_backend="fused"),
            [f"{MODEL}.attention_backend: has no effect on Qwen3ForCausalLM, whose layers are torch's"],
        ),
        (GEMMA2, FP8, [f"{MODEL}.fp8: has no effect on Gemma2ForCausalLM, whose layers are torch's"]),
        (QWEN3, {"moe": {"freeze_router": True}}, ["trainer.moe: Qwen3ForCausalLM has no experts"]),
        (QWEN3_MOE, {"moe": {"freeze_router": True}}, []),
        (QWEN3, model(moe_permute_fusion=True), [f"{MODEL}.moe_permute_fusion: Qwen3ForCausalLM has no experts"]),
        (QWEN3_MOE, model(moe_permute_fusion=True, apply_rope_fusion=True, bias_activation_fusion=True), []),
        (QWEN3, model(mlp_chunks_for_training=2), []),
        (QWEN3_MOE, model(mlp_chunks_for_training=1), []),
        (QWEN3_MOE, model(mlp_chunks_for_training=2), [f"{MODEL}.mlp_chunks_for_training: {WHOLE}, got 2"]),
        (DEEPSEEK_V3, model(apply_rope_fusion=True), [f"{MODEL}.apply_rope_fusion: {UNFUSED} DeepseekV3ForCausalLM"]),
        (DEEPSEEK_V3 | FUSED_ROPE, model(apply_rope_fusion=True), []),
        (GEMMA2, model(bias_activation_fusion=True), [f"{MODEL}.bias_activation_fusion: {UNFUSED} Gemma2ForCausalLM"]),
        (QWEN3, model(deterministic_mode=True), []),
        (QWEN3_5, model(deterministic_mode=False), []),
        (QWEN3_5, model(deterministic_mode=True), [f"{MODEL}.deterministic_mode: {UNPACKED}"]),
        (QWEN3_MOE, comm_type("a2a", tp=2), []),
        (QWEN3_MOE, comm_type("a2a", tp=4), [f"{CP}: {HEADS} over parallel.cp ranks, got 4 / 4 % 2 = 1"]),
        (DEEPSEEK_V3, comm_type("a2a"), [f"{CP}: Transformer Engine has only p2p for latent attention, got a2a"]),
        (
            QWEN3,
            comm_type(["p2p", "all_gather"]),
            [
                f"{CP}: needs p2p or a2a, which Transformer Engine has for packed sequences, got all_gather",
                f"{CP}: needs one entry for each of 4 layers, got 2",
            ],
        ),
    ],
)
def test_fields_have_to_fit_the_model(hf_config: dict[str, Any], trainer: dict[str, Any], want: list[str]) -> None:
    assert megatron_problems(hf_config, **trainer) == want


def gather_problems(name: str, ep: int, strategy: str) -> list[str]:
    hf_config = CONFIGS[name] | {"architectures": [{"gpt_oss": "GptOssForCausalLM"}.get(name, "Qwen3MoeForCausalLM")]}
    config = run_config(
        {"type": "grpo"},
        trainer={"parallel": {"ep": ep}},
        placement={"slots_per_node": 4},
        weight_sync={"strategy": strategy},
    )
    return list(find_gather_problems(config, load_architecture(hf_config, origin="config.json"), hf_config))


def test_tensors_of_all_experts_are_not_gathered_over_expert_parallel_ranks() -> None:
    assert gather_problems("gpt_oss", 2, "exact") == gather_problems("gpt_oss", 1, "gather_hf") == []
    assert gather_problems("qwen3_moe", 2, "gather_hf") == []
    assert gather_problems("gpt_oss", 2, "gather_hf") == [
        "weight_sync.strategy: gather_hf needs trainer.parallel.ep: 1 for GptOssForCausalLM, whose tensors have all "
        "experts of a layer, got 2; micro_dp and exact do not"
    ]


@pytest.mark.parametrize(
    ("hf_config", "tp", "options", "device", "want"),
    [
        (DEEPSEEK_V3, 4, {"attn_dp_size": 2}, "cuda", []),
        (QWEN3 | {"num_attention_heads": 6, "num_key_value_heads": 2}, 4, {"attn_dp_size": 2}, "cuda", []),
        (
            QWEN3 | {"num_attention_heads": 6, "num_key_value_heads": 6},
            8,
            {"attn_dp_size": 2},
            "cuda",
            [
                "rollout.tp / 2 groups of data-parallel attention: model.layers.0.self_attn.q_proj.weight has query "
                "heads that do not divide, 6 % 4 = 2",
                "rollout.tp / 2 groups of data-parallel attention: model.layers.0.self_attn.k_proj.weight has "
                "key-value heads that do not divide, 6 % 4 = 2",
            ],
        ),
        (
            QWEN3_MOE | {"num_experts": 6, "moe_intermediate_size": 24},
            4,
            {"ep_size": 4},
            "cuda",
            [f"{ENGINE}.ep_size: Qwen3MoeForCausalLM has experts that do not divide, 6 % 4 = 2"],
        ),
        (
            QWEN3_MOE,
            4,
            {"ep_size": 4, "moe_a2a_backend": "deepep"},
            "cpu",
            [f"{ENGINE}.moe_a2a_backend: deepep needs engines on cuda, got cpu"],
        ),
        (
            QWEN3,
            1,
            {"moe_a2a_backend": "deepep"},
            "cuda",
            [f"{ENGINE}.moe_a2a_backend: Qwen3ForCausalLM has no experts, got deepep"],
        ),
    ],
)
def test_engines_of_several_ranks_need_sizes_that_divide(
    hf_config: dict[str, Any], tp: int, options: dict[str, Any], device: str, want: list[str]
) -> None:
    model = load_architecture(hf_config, origin="config.json")
    rollout = RolloutConfig.model_validate({"tp": tp, "engine": {"extra_args": options}})
    assert list(find_engine_size_problems(model, rollout, device)) == want


REPLAY = "trainer.moe.router_replay"


@pytest.mark.parametrize(
    ("hf_config", "fields", "want"),
    [
        (QWEN3_MOE, {}, []),
        (QWEN3, {}, ["trainer.moe: Qwen3ForCausalLM has no experts"]),
        (QWEN3_MOE | {"num_experts_per_tok": 1}, {}, [f"{REPLAY}: needs at least 2 experts per token, got 1"]),
        (
            QWEN3_MOE,
            {"moe_router_fusion": True},
            [f"{REPLAY}: needs megatron.model.moe_router_fusion: false, as the fused kernel chooses experts itself"],
        ),
    ],
)
def test_replay_of_routes_has_to_fit_the_model(hf_config: Any, fields: dict[str, Any], want: list[str]) -> None:
    trainer = {"moe": {"router_replay": "R2"}, "megatron": {"model": fields}}
    model = load_architecture(hf_config, origin="config.json")
    config = run_config({"type": "grpo"}, trainer=trainer)
    assert list(find_megatron_problems(config, model, "cuda")) == want


def test_engines_outside_the_package_return_no_routes() -> None:
    model, trainer = load_architecture(QWEN3_MOE, origin="config.json"), {"moe": {"router_replay": "R3"}}
    configs = [
        run_config(
            {"type": "grpo"},
            trainer=trainer,
            rollout={"engine": {"type": kind}},
            weight_sync={"strategy": "gather_hf"},
        )
        for kind in ("sglang", "engines:Engine")
    ]
    found = [find_megatron_problems(config, model, "cuda") for config in configs]
    assert list(map(list, found)) == [[], [f"{REPLAY}: R3 needs rollout.engine.type: sglang, got engines:Engine"]]


def test_routes_of_engines_with_data_parallel_attention_are_not_replayed() -> None:
    model = load_architecture(QWEN3_MOE, origin="config.json")
    config = run_config(
        {"type": "grpo"},
        trainer={"moe": {"router_replay": "R3"}},
        rollout={"tp": 2, "engine": {"extra_args": {"attn_dp_size": 2}}},
        placement={"slots_per_node": 2},
    )
    assert list(find_megatron_problems(config, model, "cuda")) == [
        f"{REPLAY}: R3 needs engines without data-parallel attention, in which SGLang returns the routes of other "
        "tokens for prompts computed in a CUDA graph: remove attn_dp_size and dp_size from rollout.engine.extra_args, "
        "got 2 groups"
    ]


def test_other_commands_have_no_routes_to_replay() -> None:
    assert megatron_problems(QWEN3_MOE, moe={"router_replay": "R2"}) == [
        f"{REPLAY}: only megarl train passes over a token more than once in a step, got R2"
    ]


def test_adam_on_the_cpu_needs_parameters_of_one_dtype() -> None:
    on_host = {"optimizer": {"optimizer_cpu_offload": True}}
    assert megatron_problems(QWEN3_5, "cuda", megatron=on_host) == []
    assert megatron_problems(QWEN3_5 | {"mamba_ssm_dtype": "float32"}, "cuda", megatron=on_host) == [
        "trainer.megatron.optimizer.optimizer_cpu_offload: needs all parameters in bfloat16, got float32 for "
        "model.layers.0.linear_attn.A_log, as config.json says"
    ]


def test_fields_of_transformer_engine_are_refused_on_the_cpu() -> None:
    recompute = {"granularity": "selective", "modules": ["layernorm"]}
    assert megatron_problems(QWEN3, "cpu", **FP8, recompute=recompute) == [
        f"{MODEL}.fp8: hybrid needs CUDA and Transformer Engine",
        "trainer.recompute.modules: layernorm needs CUDA and Transformer Engine",
    ]
    assert megatron_problems(QWEN3, "cpu", **model(apply_rope_fusion=False)) == []
    on_host = {"megatron": {"optimizer": {"optimizer_cpu_offload": True}}}
    assert megatron_problems(QWEN3, "cuda", **on_host) == []
    assert megatron_problems(QWEN3, "cpu", **on_host, dtype="bfloat16") == []
    assert megatron_problems(QWEN3, "cpu", **on_host) == [
        "trainer.megatron.optimizer.optimizer_cpu_offload: needs model.dtype: bfloat16, got float32"
    ]


def test_description_differs_by_model_and_device() -> None:
    config = SftConfig.model_validate(REQUIRED)

    def describe(hf_config: dict[str, Any], device: str | None) -> str:
        return " ".join(describe_megatron(config, load_architecture(hf_config, origin="config.json"), device))

    assert "apply_rope_fusion=false" in describe(QWEN3, "cpu")
    assert "moe_permute_fusion=true" in describe(QWEN3_MOE, "cuda")
    assert "megatron: torch layers" in describe(GEMMA2, None)
    assert "bias_activation_fusion=false" in describe(GEMMA2, None)


COLOCATED = "placement: {slots_per_node: 4, nodes: 2, device: cuda}, trainer: {parallel: {tp: 4}}"
DEDICATED = (
    "placement: {slots_per_node: 4, device: cuda, rollout: {pool: b}, pools: {b: {nodes: 2, slots_per_node: 4}}}, "
    "trainer: {parallel: {tp: 4}}"
)
LAYOUTS = {
    "micro_dp": f"{COLOCATED}, rollout: {{tp: 2, replicas: 4}}",
    "fewer engines than fit": f"{COLOCATED}, rollout: {{tp: 2, replicas: 1}}",
    "exact": f"{COLOCATED}, rollout: {{tp: 4, replicas: 2}}, weight_sync: {{strategy: exact}}",
    "exact, tp grows": f"{COLOCATED.replace('tp: 4', 'tp: 1')}, rollout: {{tp: 4, replicas: 2}}",
    "dedicated engines": f"{DEDICATED}, rollout: {{tp: 2, replicas: 4}}",
    "engines over two nodes": (
        f"{DEDICATED.replace('nodes: 2, slots_per_node: 4', 'nodes: 4, slots_per_node: 2')}, "
        "rollout: {tp: 4, replicas: 2}"
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tree = write_tiny_run(tmp_path_factory.mktemp("weight_sync"))
    return tree | {"algorithm": {"prompts_per_step": 8}}


def with_layout(tree: dict[str, Any], layout: str, **sections: Any) -> dict[str, Any]:
    found = flow(LAYOUTS[layout])
    return tree | found | {"rollout": tree["rollout"] | found["rollout"]} | sections


def make_config(tree: dict[str, Any], layout: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(with_layout(tree, layout, **sections))


def weight_sync_problems(config: RunConfig) -> list[str]:
    return check_run(config, planned_nodes([5], gpus=[4], cpus=[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_progress(tree: dict[str, Any], layout: str) -> None:
    assert weight_sync_problems(make_config(tree, layout)) == []


@pytest.mark.parametrize("layout", ["micro_dp", "dedicated engines"])
def test_a_plan_that_would_hang_is_refused(tree: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank posts its groups in an order of its own."""
    groups_of, count = nccl_progress.posted_groups, iter(range(1000))

    def posted_groups(rounds: Sequence[Round], members: Sequence[int] = ()) -> list[PostedGroup]:
        parts = [
            part
            for group in groups_of(rounds, members)
            for part in (
                PostedGroup(receives=group.receives, step=group.step),
                PostedGroup(sends=group.sends, step=group.step),
                PostedGroup(all_gathers=group.all_gathers, communicator=group.communicator, step=group.step),
            )
            if part.receives or part.sends or part.all_gathers
        ]
        return parts[:: 1 if next(count) % 2 else -1]

    monkeypatch.setattr(nccl_progress, "posted_groups", posted_groups)
    (problem,) = weight_sync_problems(make_config(tree, layout))
    assert has_parts(problem, "weight_sync: the first sync would hang over NCCL: rank ... of round ")


def test_the_check_is_for_nccl_only(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tree, "micro_dp")
    monkeypatch.setattr(nccl_progress, "posted_groups", None)
    with pytest.raises(TypeError):
        list(weight_sync_checks.find_stall_problems(config, "cuda"))
    assert list(weight_sync_checks.find_stall_problems(config, "cpu")) == []


@pytest.mark.parametrize(
    ("strategy", "limit", "notice"),
    [
        ("auto", 20_000, None),
        ("gather_hf", 20_000, "gather_hf calls its collectives in the same order"),
        ("auto", 100, "planning 25 tensors for 8 ranks takes too long here; `megarl reshard explain` simulates it"),
    ],
)
def test_a_plan_that_is_not_simulated_is_named(
    tree: dict[str, Any], strategy: str, limit: int, notice: str | None, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(weight_sync_checks, "MAX_TENSORS", limit)
    layout = with_layout(tree, "micro_dp", weight_sync={"strategy": strategy})
    recipe = write_config(tmp_path / "run.yaml", layout)
    assert main(["check", str(recipe), "--nodes", "2", "--gpus-per-node", "4"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# weight_sync")]
    if notice is not None:
        (line,) = lines
        assert line.startswith(f"# weight_sync: not simulated under NCCL's rules: {notice}")
    else:
        assert len(lines) == 1
        assert " ms planned, at least " in lines[0]


@pytest.mark.parametrize("layout", ["micro_dp", "dedicated engines"])
def test_the_time_of_a_sync_over_several_nodes_is_shown(tree: dict[str, Any], layout: str) -> None:
    config = make_config(tree, layout)
    (line,) = weight_sync_checks.describe_sync_time(config, "cuda")
    found = re.match(r"weight_sync: ([\d.]+) ms planned, at least ([\d.]+) ms with any method", line)
    assert found is not None
    planned, bound = map(float, found.groups())
    assert planned >= bound
    assert "at 50 GB/s per NIC, one for each rank, and 400 GB/s of NVLink; " in line
    assert weight_sync_checks.describe_sync_time(config, "cpu") == []


def test_delta_needs_engines_that_keep_their_weights(tree: dict[str, Any]) -> None:
    delta = {"weight_sync": {"delta": True}}
    refused, dedicated = (make_config(tree, layout, **delta) for layout in ("micro_dp", "dedicated engines"))
    (problem,) = weight_sync_problems(refused)
    assert problem.startswith("weight_sync.delta needs engines that keep their weights while the trainer works: set ")
    for config, device in ((refused, "cpu"), (dedicated, "cuda"), (dedicated, None)):
        assert list(weight_sync_checks.find_delta_problems(config, device)) == []
    released = {"rollout": tree["rollout"] | {"engine": {"type": "sglang", "release_memory": True}}}
    with expect_error(ValueError, "weight_sync.delta", "release_memory"):
        make_config(tree, "micro_dp", **delta, **released)
    with expect_error(ValueError, "weight_sync.delta", "weight_sync.strategy", "micro_dp"):
        RunConfig.model_validate(tree | {"weight_sync": {"delta": True, "strategy": "gather_hf"}})
