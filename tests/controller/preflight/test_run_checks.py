from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.cli.main import main
from megarl.config import RunConfig, SftConfig
from megarl.controller.preflight import machine_checks
from megarl.controller.preflight.model_checks import write_missing_model
from megarl.controller.preflight.run_checks import check_or_raise, check_run, find_warmup_notices
from megarl.controller.run_stage import resolve_and_check
from megarl.data.prompts import resolve_max_prompt_tokens
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError
from megarl.megatron.training.optimizer import make_scheduler
from tests.cli.tiny_run import write_config, write_rows
from tests.config.runs import flow, has_parts
from tests.megatron.families.outside import STORY_PATH
from tests.megatron.fidelity.models import CONFIGS, build, save_model

PLACEHOLDER = {"type": "python", "path": "tests.controller.preflight.test_run_checks:reward"}


def reward(trajectory: object, text: str, row: dict[str, Any]) -> float:
    return 0.0


def run_problems(tree: dict[str, Any], **sections: Any) -> list[str]:
    return check_run(RunConfig.model_validate(tree | sections))


def sft_problems(tree: dict[str, Any], **sections: Any) -> list[str]:
    stage = {key: value for key, value in tree.items() if key not in ("rollout", "reward")}
    return check_run(SftConfig.model_validate(stage | sections))


def edit_config(folder: str, **values: Any) -> None:
    """Change the model's config.json."""
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def hf(tree: dict[str, Any], **values: Any) -> None:
    edit_config(tree["model"]["path"], **values)


def test_a_valid_configuration_has_no_problems(tree: dict[str, Any]) -> None:
    tree["rollout"] |= {"tp": 2, "engine": {"base_port": 20_000}}
    tree["reward"] = {"terms": {"a": {"type": "numeric"}, "f": {"type": "format"}, "p": PLACEHOLDER}}
    tree |= {"placement": {"slots_per_node": 4}, "trainer": {"parallel": {"tp": 2, "pp": 2}}}
    assert run_problems(tree) == []
    check_or_raise(RunConfig.model_validate(tree))
    assert sft_problems(tree | {"placement": {}, "trainer": {}}) == []


def test_all_problems_are_found_in_one_pass(tree: dict[str, Any]) -> None:
    hf(tree, num_attention_heads=3, num_key_value_heads=1)
    tree["data"] = {"path": "none.jsonl", "eval_path": "none.parquet"}
    tree["rollout"]["max_new_tokens"] = 128
    config = RunConfig.model_validate(tree | {"placement": {"slots_per_node": 2}, "trainer": {"parallel": {"tp": 2}}})
    with pytest.raises(ConfigError) as error:
        check_or_raise(config)
    keys = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert set(keys) >= {"data.path", "data.eval_path", "trainer.parallel.tp", "rollout.max_new_tokens", "model.path"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json cannot be read: No such file or directory"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json needs a JSON object, got list"),
        ("{}", "config.json needs a positive number under hidden_size, "),
        ('{"architectures": ["GotForConditionalGeneration"]}', "GotForConditionalGeneration is not supported, "),
        ({"layer_types": ["full_attention"]}, "config.json: layer_types needs num_hidden_layers = 2 entries, got 1"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported, "),
    ],
)
def test_model_configuration_unusable(tree: dict[str, Any], content: str | dict[str, Any] | None, message: str) -> None:
    file = Path(tree["model"]["path"]) / "config.json"
    if isinstance(content, dict):
        hf(tree, **content)
    elif content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert has_parts(run_problems(tree)[0], "model.path: ... " + message)


def test_tokenizer_missing(tree: dict[str, Any]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(tree["model"]["path"]) / name).unlink()
    (problem,) = run_problems(tree)
    assert has_parts(problem, "model.path: ... holds no tokenizer")


def test_missing_mtp_layers_are_no_problem_but_a_notice(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "without-mtp"
    build(CONFIGS["deepseek_v3"]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tree["model"]["path"]) / name, folder)
    del tree["rollout"]
    tree["model"] = {"path": str(folder)}
    notice = f"model.path: {folder}: config.json names 1 MTP layer, the folder has none: ignoring it"
    assert check_run(SftConfig.model_validate(tree)) == []
    assert main(["check", str(write_config(tmp_path / "sft.yaml", tree)), "--stage", "sft"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == [f"# {notice}", "# ok: no problems found for megarl sft"]
    resolve_and_check(SftConfig.model_validate(tree))
    assert capsys.readouterr().err == f"{notice}\n"


def test_warm_up_beyond_the_run_is_a_notice(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del tree["rollout"]
    tree["trainer"] = {"steps": 10, "optimizer": {"lr": 1e-4, "warmup_steps": 1000}}
    notice = (
        "trainer.optimizer.warmup_steps: 1000 optimizer steps are more than the run's 10, so that the learning rate "
        "ends at 10 / 1000 of lr = 0.0001"
    )
    assert main(["check", str(write_config(tmp_path / "sft.yaml", tree)), "--stage", "sft"]) == 0
    assert f"# {notice}\n" in capsys.readouterr().out
    resolve_and_check(SftConfig.model_validate(tree))
    assert capsys.readouterr().err == f"{notice}\n"
    config = SftConfig.model_validate(tree)
    assert scheduled_rate(config) == pytest.approx(1e-4 * 10 / 1000)
    tree["trainer"]["optimizer"]["warmup_steps"] = 10
    assert list(find_warmup_notices(SftConfig.model_validate(tree))) == []


def scheduled_rate(config: SftConfig) -> float:
    """Return the learning rate of the run's last update in megatron-core's schedule."""
    groups: Any = SimpleNamespace(param_groups=[{}])
    scheduler = make_scheduler(config.trainer.optimizer, groups, config.policy_updates)
    for _ in range(config.policy_updates - 1):
        scheduler.step(1)
    return float(groups.param_groups[0]["lr"])


def test_optimizers_of_each_model_are_tried_out(tree: dict[str, Any]) -> None:
    tree["trainer"] = {"optimizer": {"type": "sgd", "kwargs": {"momentum": 0.9}}}
    tree["algorithm"] = {"type": "ppo", "critic": {"optimizer": {"type": "torch.optim:RMSprop"}}}
    assert run_problems(tree) == []
    tree["trainer"]["optimizer"]["kwargs"] = {"momentum": -1}
    tree["algorithm"]["critic"]["optimizer"] = {"type": "torch.optim:NAdam"}
    of_policy, of_critic = run_problems(tree)
    assert has_parts(of_policy, "trainer.optimizer: creating sgd raised ValueError: Invalid momentum ...")
    assert has_parts(of_critic, "algorithm.critic.optimizer.type: torch.optim:NAdam has the state 'mu_product' ...")


def test_updates_of_each_model_are_compared_with_its_own_warm_up(tree: dict[str, Any]) -> None:
    tree["trainer"] = {"steps": 10, "optimizer": {"warmup_steps": 18}}
    tree["algorithm"] = {"type": "ppo", "prompts_per_step": 4, "num_mini_batches": 2}
    tree["algorithm"]["critic"] = {"warmup_steps": 2, "optimizer": {"warmup_steps": 18}}
    assert list(find_warmup_notices(RunConfig.model_validate(tree))) == [
        "trainer.optimizer.warmup_steps: 18 optimizer steps are more than the run's 16, so that the learning rate "
        "ends at 16 / 18 of lr = 1e-06"
    ]


def weights(tree: dict[str, Any]) -> Path:
    return Path(tree["model"]["path"]) / "model.safetensors"


def test_weights_missing_or_unreadable(tree: dict[str, Any]) -> None:
    file, content = weights(tree), weights(tree).read_bytes()
    file.write_bytes(content[:-1000])
    (cut_short,) = run_problems(tree)
    assert f"{file} is not readable as safetensors: " in cut_short
    file.unlink()
    assert run_problems(tree) == [f"model.path: {tree['model']['path']} holds no safetensors files"]
    file.write_bytes(content)
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-2.safetensors"}}))
    (missing,) = run_problems(tree)
    assert "model-2.safetensors is not readable as safetensors" in missing


def test_weights_of_another_model(tree: dict[str, Any]) -> None:
    tensors = load_file(weights(tree))
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = np.zeros((384, 64), dtype=np.float32)
    save_file(tensors, weights(tree))
    missing, shape = run_problems(tree)
    assert "lacks 1 of the 25 tensors of Qwen3ForCausalLM, first model.norm.weight" in missing
    assert "first lm_head.weight: needs (384, 128), got (384, 64)" in shape


def test_weights_beyond_the_model(tree: dict[str, Any]) -> None:
    hf(tree, tie_word_embeddings=True)
    assert "lm_head.weight" in load_file(weights(tree))
    assert run_problems(tree) == []
    hf(tree, tie_word_embeddings=False, num_hidden_layers=1, layer_types=["full_attention"])
    (problem,) = run_problems(tree)
    assert problem == (
        f"model.path: {tree['model']['path']} holds 11 tensors that Qwen3ForCausalLM as config.json describes it does "
        "not have, first model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 8 more"
    )


def test_a_stored_head_with_other_values_is_no_problem_but_a_notice(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf(tree, tie_word_embeddings=True)
    single = weights(tree).with_name("model.safetensors.index.json")
    single.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(weights(tree)), "shards.safetensors")}))
    shutil.copy(weights(tree), weights(tree).with_name("shards.safetensors"))
    assert main(["check", str(write_config(tmp_path / "run.yaml", tree))]) == 0
    head, unread = (line for line in capsys.readouterr().out.splitlines() if line.startswith("# model.path: "))
    assert "stores an lm_head.weight with other values: using that head, as transformers does" in head
    assert f"{weights(tree)} is not read: model.safetensors.index.json lists other files" in unread


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", ["258", -1, [1, 5000], True])
def test_stop_tokens_that_are_none_are_refused(tree: dict[str, Any], file: str, ids: Any) -> None:
    path = Path(tree["model"]["path"], file)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    problem = f"model.path: {path}: eos_token_id needs a token id or a list of them, from 0 to below the model's "
    for problems in (run_problems(tree), sft_problems(tree | {"data": {"path": str(path.parent / "no.jsonl")}})):
        assert [each for each in problems if each.startswith(problem)] == [problem + f"vocab_size = 384, got {ids!r}"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_git_lfs_pointers_are_named(tree: dict[str, Any], file: str) -> None:
    path = Path(tree["model"]["path"], file)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234567\n")
    problem = f"model.path: {path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    assert problem in run_problems(tree)


def test_prompts_with_tokens_beyond_the_vocabulary_are_refused(tree: dict[str, Any]) -> None:
    folder = tree["model"]["path"]
    tokenizer = load_tokenizer(folder)
    rows = Path(tree["data"]["path"])
    tokenizer.add_tokens([f"<extra-{n}>" for n in range(385 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    assert run_problems(tree) == []
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": tokenizer.convert_ids_to_tokens(384), "answer": "1"}) + "\n")
    (problem,) = run_problems(tree)
    line = len(rows.read_text().splitlines())
    assert problem.startswith(f"data.path: {rows}:{line}: token 384 (")


@pytest.fixture
def gemma2(tree: dict[str, Any]) -> dict[str, Any]:
    """The run with a Gemma 2 model, which the CPU engine does not run faithfully, and the original tokenizer."""
    old = Path(tree["model"]["path"])
    new = save_model("gemma2", old.parent / "families")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(old / name, new)
    return tree | {"model": {"path": new}}


def test_an_option_that_the_cpu_engine_ignores_is_refused(
    gemma2: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = (
        f"placement.device: {gemma2['model']['path']}/config.json: attn_logit_softcapping needs engines on cuda, the "
        "CPU engine leaves it out, got 5.0 on cpu"
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for device, gpus, address, is_reported in (
        ("cpu", ["H200"], "", True),
        ("auto", [], "", True),
        ("auto", ["H200"], "", False),
        ("cuda", ["H200"], "", False),
        ("auto", [], "10.0.0.1:6379", False),
    ):
        monkeypatch.setattr(machine_checks, "visible_gpu_names", lambda gpus=gpus: gpus)
        if address:
            monkeypatch.setenv("RAY_ADDRESS", address)
        assert sft_problems(gemma2, placement={"device": device}) == []  # it has no engines
        assert run_problems(gemma2, placement={"device": device}) == is_reported * [problem]


HEADS = "model.layers.0.self_attn.q_proj.weight has query heads that do not divide,"
ENGINES = (
    "rollout.replicas: engines need rollout.tp = 2 slots of one node each, got replicas = 3 > "
    "nodes * (slots_per_node // tp)"
)
TWELVE = {"placement": {"slots_per_node": 12}}


def rollout(**values: Any) -> dict[str, Any]:
    return {"rollout": {"max_new_tokens": 32, **values}}


def parallel(**sizes: int) -> dict[str, Any]:
    return TWELVE | {"trainer": {"parallel": sizes}}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (parallel(tp=3), f"trainer.parallel.tp: {HEADS} 4 % 3 = 1"),
        (parallel(tp=12), f"trainer.parallel.tp: {HEADS} 4 % 12 = 4"),
        (parallel(pp=3), "trainer.parallel.pp: pp needs to divide the layers, got 2 % 3 = 2"),
        (
            parallel(pp=2, vpp=2),
            "trainer.parallel.pp: vpp needs to divide the layers of every stage, got 1 % 2 = 1 on stage 0",
        ),
        (parallel(ep=2), "trainer.parallel.ep: Qwen3ForCausalLM has no experts to distribute over ep = 2 ranks"),
        (TWELVE | rollout(tp=3), f"rollout.tp: {HEADS} 4 % 3 = 1"),
        (
            TWELVE | rollout(tp=3),
            "rollout.tp: model.layers.0.self_attn.k_proj.weight has key-value heads that do not divide, 2 % 3 = 2",
        ),
        (
            rollout(max_new_tokens=200),
            "rollout.max_new_tokens: needs to leave room for a prompt in the model's max_position_embeddings = 128, "
            "got 200, 128 - 200 = -72",
        ),
        (
            flow("placement: {slots_per_node: 2}, trainer: {profile: {steps: [1], ranks: [0, 2]}}"),
            "trainer.profile.ranks: the trainer has ranks 0 to 1, got 2",
        ),
        (
            parallel(pp=2)
            | flow(
                "placement: {slots_per_node: 6}, algorithm: {prompts_per_step: 4, group_size: 2, num_mini_batches: 4}"
            ),
            "algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank, got "
            "prompts_per_step * group_size / num_mini_batches = 4 * 2 / 4 = 2 < dp = slots / (tp * pp * cp) = "
            "6 / 2 = 3",
        ),
        ({"placement": {"nodes": 2, "slots_per_node": 3}} | rollout(tp=2, replicas=3), f"{ENGINES} = 2 * (3 // 2) = 2"),
        (
            flow("placement: {slots_per_node: 4, rollout: {pool: b}, pools: {b: {nodes: 2, slots_per_node: 3}}}")
            | rollout(tp=2, replicas=3),
            f"{ENGINES} of placement.pools.b = 2 * (3 // 2) = 2",
        ),
        ({"model": {"path": "Qwen/Q"}}, "model.path: needs a folder in Hugging Face format, there is no folder Qwen/Q"),
    ],
)
def test_settings_that_do_not_fit(tree: dict[str, Any], sections: dict[str, Any], problem: str) -> None:
    found = run_problems(tree, **sections)
    assert problem in found
    assert len(found) == 1 or "do not divide" in problem


def test_rows_that_do_not_divide(tree: dict[str, Any]) -> None:
    assert run_problems(tree, placement={"slots_per_node": 4}, **rollout(tp=4)) == []  # engines repeat key-value heads
    hf(tree, intermediate_size=383)
    got = run_problems(tree, placement={"slots_per_node": 2}, trainer={"parallel": {"tp": 2}})
    assert "trainer.parallel.tp: model.layers.0.mlp.gate_proj.weight has rows that do not divide, 383 % 2 = 1" in got


def test_prompt_budget(tree: dict[str, Any]) -> None:
    for given, budget in ((None, 96), (10, 10)):
        tree["data"]["max_prompt_tokens"] = given
        config = RunConfig.model_validate(tree)
        source = config.data.resolved_sources[0]
        assert resolve_max_prompt_tokens(config, {"max_position_embeddings": 128}, source) == budget
    tree["data"]["max_prompt_tokens"] = 100
    (problem,) = run_problems(tree)
    assert has_parts(problem, "data.max_prompt_tokens: ... + rollout.max_new_tokens = 100 + 32 = 132")


@pytest.mark.parametrize("key", ["path", "eval_path"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "no such data file"),
        ("", "has no rows"),
        ("{", ":1: not valid JSON"),
        ({"query": "1"}, ":1: field 'prompt' (data.fields.prompt) is missing; the row has 'query'"),
        ({"prompt": "1" * 97}, ":1: the prompt has 97 tokens, 1 more than data.max_prompt_tokens = 96"),
        ({"prompt": "1"}, "needs field 'answer' (data.fields.answer), 1 of 1 rows have none, first rows.jsonl:1"),
        ('{"prompt": "1", "answer": NaN}', "needs field 'answer' ... 1 of 1 rows have none, first rows.jsonl:1 (nan)"),
        ({"prompt": "1", "answer": " "}, "needs field 'answer' ... 1 of 1 rows have none, first rows.jsonl:1 (' ')"),
        (
            {"prompt": "1", "answer": True},
            "... first rows.jsonl:1 (of type bool, not a text, an integer or a float)",
        ),
        ({"prompt": "1", "answer": [["7"]]}, "... first rows.jsonl:1 (of type list, not a text"),
    ],
)
def test_data_files(tree: dict[str, Any], tmp_path: Path, key: str, row: Any, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    if row is not None:
        file.write_text(row if isinstance(row, str) else json.dumps(row))
    tree["data"][key] = str(file)
    (problem,) = run_problems(tree)
    assert has_parts(problem, f"data.{key}: ... {message}")


@pytest.mark.parametrize(
    ("term", "answer", "message"),
    [
        ({"type": "numeric"}, "x+1", "(numeric) needs a number (the reward math has ...) in field 'answer' ...: 'x+1'"),
        ({"type": "math"}, r"\frac{1}{", "(math) needs an answer ... (the reference answer cannot be read)"),
        ({"type": "math"}, "9^{9^{9^9}}", "(math) needs ... takes more than cpu_seconds = 1, or too much memory)"),
        ({"type": "numeric"}, r"so \boxed{5\text{ cm}}", None),
        ({"type": "math"}, r"\{x : x < 3\}", None),
        ({"type": "math"}, r"\text{Evelyn}", None),
    ],
)  # fmt: skip
def test_reference_answers_that_cannot_be_read_are_found(
    tree: dict[str, Any], tmp_path: Path, term: dict[str, Any], answer: str, message: str | None
) -> None:
    rows = [{"prompt": "1", "answer": "7"}, {"prompt": "2", "answer": answer}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree["data"]["path"] = str(tmp_path / "rows.jsonl")
    tree["reward"] = {"terms": {"right": term}}
    found = run_problems(tree)
    assert len(found) == (message is not None)
    for problem in found:
        assert "1 of 2 rows have others: rows.jsonl:2:" in problem
        assert has_parts(problem, f"data.path: ... reward.terms.right {message}")


def test_a_judge_whose_rubric_has_the_answer_needs_it(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["data"]["path"] = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "answer": "a"}, {"prompt": "2"}]))
    judge = {"type": "judge", "url": "http://judge/v1", "model": "m", "rubric": "{completion}"}
    assert run_problems(tree, reward={"terms": {"j": judge}}) == []
    (problem,) = run_problems(tree, reward={"terms": {"j": judge | {"rubric": "{completion} {answer}"}}})
    assert has_parts(problem, "data.path: reward.terms.j (judge) needs field 'answer' ... 1 of 2 rows ... rows.jsonl:2")


def test_data_is_parsed_even_without_a_tokenizer(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n")
    tree["data"]["path"] = str(tmp_path / "rows.jsonl")
    got = run_problems(tree, model={"path": "none"})
    assert [line.partition(":")[0] for line in got] == ["model.path", "data.path"]
    # a problem of the section itself has no key as its prefix
    (problem,) = run_problems(tree, data={"path": str(tmp_path / "train.jsonl"), "prompt_template": "no placeholder"})
    assert problem.startswith("data.prompt_template needs {prompt}")


def test_rows_without_answers_and_responses(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = {"path": str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "1"}]))}
    assert run_problems(tree, data=rows, reward={"terms": {"p": PLACEHOLDER}}) == []
    (problem,) = sft_problems(tree, data=rows)
    assert has_parts(problem, "data.path: ... needs field 'response'")
    (problem,) = sft_problems(tree, placement={"slots_per_node": 4}, trainer={"batch_size": 2})
    assert "got 2 < dp = slots / (tp * pp * cp) = 4 / 1 = 4" in problem


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"type": "python", "path": "no_such_module:f"}, "reward.terms.x.path: cannot import no_such_module"),
        ({"type": "python", "path": "json"}, "reward.terms.x.path needs package.module:function, got 'json'"),
        ({"type": "python", "path": "json:nothing"}, "reward.terms.x.path: module json"),
        ({"type": "format", "pattern": "("}, "reward.terms.x.pattern: needs a regular expression, got '('"),
        (PLACEHOLDER | {"kwargs": {"url": 1}}, f"reward.terms.x.kwargs: {__name__}:reward has no option "),
        ({"type": "python", "per": "group", "path": "json:dumps"}, "reward.terms.x.path needs a function of (trajec"),
    ],
)
def test_rewards(tree: dict[str, Any], term: dict[str, Any], message: str) -> None:
    (problem,) = run_problems(tree, reward={"terms": {"x": term}})
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("no_such_module:F", "model.family: cannot import no_such_module"),
        (STORY_PATH, f"model.family: {STORY_PATH} reads StoryForCausalLM models, got Qwen3ForCausalLM in "),
    ],
)
def test_families(tree: dict[str, Any], family: str, message: str) -> None:
    tree["model"]["family"] = family
    (problem,) = run_problems(tree)
    assert problem.startswith(message)
    (problem,) = run_problems(tree, algorithm={"type": "ppo"})  # its critic is a model too
    assert problem.startswith(message)


async def agent(episode: object, *, turns: int) -> None:
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("no_such_module:f", {}, "rollout.agent.path: cannot import no_such_module"),
        ("json:loads", {}, "rollout.agent.path needs an async function or a class, got json:loads = "),
        (f"{__name__}:agent", {}, f"rollout.agent.kwargs: {__name__}:agent(episode: 'object', *, turns: 'int') -> "),
        (f"{__name__}:agent", {"turns": 1, "hint": ""}, f"rollout.agent.kwargs: {__name__}:agent("),
    ],
)
def test_agents(tree: dict[str, Any], path: str, kwargs: dict[str, Any], message: str) -> None:
    tree["rollout"]["agent"] = {"path": f"{__name__}:agent", "kwargs": {"turns": 1}}
    assert run_problems(tree) == []
    tree["rollout"]["agent"] = {"path": path, "kwargs": kwargs}
    (problem,) = run_problems(tree)
    assert problem.startswith(message)


def test_ports(tree: dict[str, Any]) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        tree["rollout"] |= {"engine": {"base_port": port - 100}, "replicas": 2}
        got = run_problems(tree, placement={"slots_per_node": 2})
    assert f"rollout.engine.base_port: replica 1 needs a free port, {port - 100} + 100 * 1 = {port} is in use" in got
    tree["rollout"]["engine"] = {"base_port": 65500}
    got = run_problems(tree, placement={"slots_per_node": 2})
    assert "rollout.engine.base_port: replica 1 needs a port up to 65535, got 65500 + 100 * 1 = 65600" in got


def test_folders_that_cannot_be_created(tree: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    sections = {"run_dir": f"{file}/run", "export_dir": f"{file}/model"}
    expected = [f"{key}: {path} cannot be made, {file} is not a folder" for key, path in sections.items()]
    assert run_problems(tree, **sections) == expected


def test_folder_that_cannot_be_written(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Root can write anywhere: with real permissions this test would depend on the user.
    monkeypatch.setattr(machine_checks.os, "access", lambda *_: False)
    assert run_problems(tree)[0].startswith(f"run_dir: {tree['run_dir']} needs a folder that can be written, ")


def test_too_few_gpus(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "visible_gpu_names", lambda: ["H200"])
    placement = {"device": "cuda", "slots_per_node": 2}
    (problem,) = run_problems(tree, placement=placement)
    assert problem.startswith(
        "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2 GPUs, this machine has 1"
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run_problems(tree, placement=placement) == []


def test_wandb_missing(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "find_spec", lambda _: None)
    (problem,) = run_problems(tree, tracking={"wandb": {"project": "p"}})
    assert problem == "tracking.wandb: needs the package wandb, which is not installed"


def test_sizes_and_nodes_that_micro_dp_cannot_serve(tree: dict[str, Any]) -> None:
    tree |= {"weight_sync": {"strategy": "micro_dp"}, "placement": {"slots_per_node": 2}, **rollout(tp=2, replicas=1)}
    assert run_problems(tree, trainer={"parallel": {"tp": 2}}) == []
    (problem,) = run_problems(tree)
    assert has_parts(problem, "weight_sync.strategy: micro_dp needs the training tp to be a multiple ... tp 1 % 2 = 1")
    # engines spread over nodes
    hf(tree, num_key_value_heads=4)
    joined = {"nodes": 2, "slots_per_node": 2, "nvlink_domain_nodes": 2}
    problems = run_problems(tree, placement=joined, trainer={"parallel": {"tp": 4}})
    (problem,) = [p for p in problems if p.startswith("weight_sync")]
    assert problem.startswith("weight_sync.strategy: micro_dp puts engine 0 on the slots of trainer ranks [0, 2]")


def other(tree: dict[str, Any]) -> str:
    """Return the folder of another model, at first a copy of the run's."""
    folder = Path(tree["model"]["path"]).parent / "other"
    if not folder.exists():
        shutil.copytree(tree["model"]["path"], folder)
    return str(folder)


def turn_into_reward_model(folder: str) -> None:
    """Replace the language-model head in the folder by a scalar head."""
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    tensors["score.weight"] = np.zeros((1, tensors.pop("lm_head.weight").shape[1]), dtype=np.float32)
    save_file(tensors, file)
    edit_config(folder, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "score"})


def test_a_valid_configuration_of_auxiliary_models_has_no_problems(tree: dict[str, Any]) -> None:
    turn_into_reward_model(other(tree))
    terms = {"rm": {"type": "model", "path": other(tree)}, "cost": {"type": "model", "path": other(tree)}, "a": {}}
    algorithm = {"type": "safe_rlhf", "critic": {"path": other(tree)}, "cost_critic": {"parallel": {"tp": 2}}}
    sections = {"placement": {"slots_per_node": 2, "pools": {"b": {"slots_per_node": 2}}, "cost_critic": {"pool": "b"}}}
    assert run_problems(tree, algorithm=algorithm, reward={"terms": terms}, **sections) == []


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "vapo", "prime", "remax"])
def test_problems_of_models_in_the_policy_folder_are_reported_once(tree: dict[str, Any], algorithm: str) -> None:
    assert run_problems(tree, algorithm={"type": algorithm}) == []
    Path(tree["model"]["path"], "model.safetensors").unlink()
    problem = f"model.path: {tree['model']['path']} holds no safetensors files"
    assert run_problems(tree, algorithm={"type": algorithm}) == [problem]


AUXILIARY = {
    "ppo": "critic", "safe_rlhf": "cost_critic", "grpo": "reference", "prime": "reward_model", "distillation": "teacher"
}  # fmt: skip


@pytest.mark.parametrize("kind", AUXILIARY)
def test_missing_folders(tree: dict[str, Any], kind: str) -> None:
    algorithm = {"type": kind, AUXILIARY[kind]: {"path": "none"}}
    (problem,) = run_problems(tree, algorithm=algorithm, reward={"terms": {"a": {}, "cost": {}}})
    assert (
        problem == f"algorithm.{AUXILIARY[kind]}.path: needs a folder in Hugging Face format, there is no folder none"
    )


def test_reward_model_folder(tree: dict[str, Any]) -> None:
    terms = {"a": {}, "rm": {"type": "model", "path": other(tree)}}
    assert run_problems(tree, reward={"terms": terms}) == [
        "reward.terms.rm.path: needs a reward model, one for sequence classification with 1 label, got Qwen3ForCausalLM"
    ]
    turn_into_reward_model(other(tree))
    assert run_problems(tree, reward={"terms": terms}) == []
    tensors = load_file(Path(other(tree), "model.safetensors"))
    del tensors["score.weight"]
    save_file(tensors, Path(other(tree), "model.safetensors"))
    (problem,) = run_problems(tree, reward={"terms": terms})
    assert problem.startswith("reward.terms.rm.path: ")
    assert "first score.weight" in problem


def test_a_tiny_model_is_checked_before_it_is_written_once(tree: dict[str, Any], tmp_path: Path) -> None:
    """Its tokenizer knows the words of all fields, roles and contents of messages among them."""
    tiny = {"path": str(tmp_path / "tiny"), "tiny": {"vocab_size": 400, "num_layers": 1}}
    rows = [{"prompt": [{"role": "user", "content": "purple"}], "answer": "seventeen", "response": "because"}] * 3
    tree |= {"model": tiny, "data": {"path": str(write_rows(tmp_path / "messages.jsonl", rows))}}
    tree["reward"] = {"terms": {"accuracy": {"type": "math"}}}  # takes words
    (problem,) = run_problems(tree)
    assert problem.startswith("data.path: ")
    assert "chat template" in problem
    assert not Path(tiny["path"]).exists()
    tiny["tiny"]["chat"] = True
    assert run_problems(tree) == []
    assert not Path(tiny["path"]).exists()

    write_missing_model(RunConfig.model_validate(tree))
    tokenizer = load_tokenizer(tiny["path"])
    for word in ("user", "purple", "assistant", "seventeen", "because"):
        assert len(tokenizer.encode(word)) == 1, word
    config = Path(tiny["path"], "config.json").read_bytes()
    tiny["tiny"]["num_layers"] = 2
    write_missing_model(RunConfig.model_validate(tree))
    assert Path(tiny["path"], "config.json").read_bytes() == config


def test_a_teacher_needs_logits_and_the_tokenizer_of_the_policy(tree: dict[str, Any]) -> None:
    teacher = {"algorithm": {"type": "distillation", "teacher": {"path": other(tree)}}}
    turn_into_reward_model(other(tree))
    (problem,) = run_problems(tree, **teacher)
    assert problem.startswith("algorithm.teacher.path: ")
    assert "has a value head and no logits" in problem
    shutil.rmtree(other(tree))
    write_tiny_model(other(tree), ["another corpus altogether, another corpus altogether"] * 20, seed=0)
    (problem,) = run_problems(tree, **teacher)
    assert problem.startswith("algorithm.teacher.path: needs the tokenizer of model.path, as token ids ")
    assert " tokens differ, first " in problem


def test_parallel_sizes_of_an_auxiliary_model(tree: dict[str, Any]) -> None:
    ppo = {"type": "ppo", "kl_reward": None, "critic": {"path": other(tree)}}
    critic = ppo["critic"] | {"parallel": {"tp": 3}}
    (heads, *_) = run_problems(tree, algorithm=ppo | {"critic": critic}, placement={"slots_per_node": 3})
    assert heads == (
        "algorithm.critic.parallel.tp: model.layers.0.self_attn.q_proj.weight has query heads that do not divide, "
        "4 % 3 = 1"
    )
    edit_config(other(tree), intermediate_size=383)
    inherited = {"placement": {"slots_per_node": 2}, "trainer": {"parallel": {"tp": 2}}}
    got = run_problems(tree, algorithm=ppo, **inherited)
    rows = "model.layers.0.mlp.gate_proj.weight has rows that do not divide, 383 % 2 = 1"
    assert f"algorithm.critic: trainer.parallel.tp: {rows}" in got


def test_fewer_completions_than_ranks_of_a_critic(tree: dict[str, Any]) -> None:
    algorithm = {"type": "ppo", "kl_reward": None, "prompts_per_step": 2, "group_size": 1}
    placement = {"pools": {"b": {"slots_per_node": 3}}, "critic": {"pool": "b"}}
    assert run_problems(tree, algorithm=algorithm, placement=placement) == [
        "algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank of "
        "algorithm.critic, got prompts_per_step * group_size / num_mini_batches = 2 * 1 / 1 = 2 < slots / "
        "(tp * pp * cp) = 3 / 1 = 3"
    ]


def test_padding_of_the_vocabulary_may_differ(tree: dict[str, Any]) -> None:
    for rows, is_reported in ((400, False), (258, True)):
        file = Path(other(tree), "model.safetensors")
        tensors = load_file(file)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.zeros((rows, tensors[name].shape[1]), dtype=np.float32)
        save_file(tensors, file)
        edit_config(other(tree), vocab_size=rows)
        got = run_problems(tree, algorithm={"type": "distillation", "teacher": {"path": other(tree)}})
        assert len(got) == is_reported
        assert all(p.startswith("algorithm.teacher.path: needs a row for each token of the policy") for p in got)


def test_gpus_of_all_pools(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "visible_gpu_names", lambda: ["H200"] * 2)
    placement = {"device": "cuda", "slots_per_node": 2, "pools": {"b": {}}, "critic": {"pool": "b"}}
    assert run_problems(tree, algorithm={"type": "ppo", "kl_reward": None}, placement=placement) == [
        "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2, with placement.pools 3 GPUs, this machine "
        "has 2 (RAY_ADDRESS joins a cluster)"
    ]
