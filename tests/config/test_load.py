"""Loading: YAML files, overrides, error messages, and the round trip through `dump_config`, also of all recipes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from megarl.algorithms import ppo
from megarl.config import STAGES, RunConfig, SftConfig, command_of, dump_config, load_config, load_resolved
from megarl.config.load import FIXED_KEYS, make_config, parse_yaml, read_tree
from megarl.config.reward import NumericRewardConfig
from megarl.errors import ConfigError
from megarl.reward import services
from megarl.run.supervision import restart_budget
from tests.config.runs import REQUIRED, make_run
from tests.errors import expect_error

MINIMAL = "run_dir: runs/x\nmodel: {path: m}\ndata: {path: d.jsonl}\n"

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(content: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


def problems(path: Path, *overrides: str, kind: type[RunConfig] | type[SftConfig] = RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(kind, path, list(overrides))
    assert error.value.exit_code == 2
    return [line.removeprefix(f"{path}: ") for line in str(error.value).splitlines()]


def test_dates_are_text(write: Write) -> None:
    config = load_config(SftConfig, write(MINIMAL.replace("runs/x", "2026-11-27")), ["export_dir=2026-13-02"])
    assert (config.run_dir, config.export_dir) == ("2026-11-27", "2026-13-02")
    (found,) = problems(write(MINIMAL), "data.template_date=2026-13-02", kind=SftConfig)
    assert found == "data.template_date: needs a date, YYYY-MM-DD, got 2026-13-02"


def at(config: object, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.optimizer.lr=1e-6", 1e-6),
        ("trainer.optimizer.lr=3E-4", 3e-4),
        ("trainer.optimizer.lr= 0.5", 0.5),
        ("trainer.steps=7", 7),
        ("trainer.parallel.sequence_parallel=null", None),
        ("data.shuffle=false", False),
        ("data.prompt_template='{prompt} = '", "{prompt} = "),
        ('data.prompt_template="a=b\\n{prompt}"', "a=b\n{prompt}"),
        ("export_dir=out", "out"),
        ("rollout.engine.extra_args.chunked_prefill_size=64", 64),
    ],
)
def test_override_sets_a_value_with_its_type(write: Write, override: str, value: Any) -> None:
    config = load_config(RunConfig, write(MINIMAL), [override])
    got = at(config, override.partition("=")[0])
    assert (got, type(got)) == (value, type(value))


def test_overrides_apply_in_order(write: Write) -> None:
    path = write(MINIMAL + "seed: 1\ntrainer:\n")
    config = load_config(RunConfig, path, ["seed=2", "seed=3", "trainer.steps=3"])
    assert (config.seed, config.trainer.steps) == (3, 3)
    config = load_config(RunConfig, write(MINIMAL), ["rollout={tp: 2, max_new_tokens: 9}", "rollout.tp=1"])
    assert (config.rollout.tp, config.rollout.max_new_tokens) == (1, 9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: needs the form key.path=value"),
        ("=1", "--set =1: needs the form key.path=value"),
        ("seed.x=1", "--set seed.x=1: seed is of type int, not a section"),
        ("seed=[1", "--set seed=[1:1: not valid YAML: "),
        ("sed=1", "sed: unknown key"),
        ("trainer.optimizer.momentum=1", "trainer.optimizer.momentum: unknown key"),
        ("trainer.steps=many", "trainer.steps: Input should be a valid integer"),
        ("trainer=3", "trainer: needs a mapping, got 3"),
        ("trainer.optimizer.lr=.inf", "trainer.optimizer.lr: Input should be a finite number"),
        ("algorithm.type=ppos", "algorithm.type: needs one of 'grpo', 'dr_grpo', "),
    ],
)
def test_override_errors(write: Write, override: str, message: str) -> None:
    (line,) = problems(write(MINIMAL + "seed: 1\nalgorithm: {type: grpo}\n"), override)
    assert line.startswith(message)


CONSTANTS = {
    "algorithm.pretraining.min_explained_variance": ppo.MIN_EXPLAINED_VARIANCE,
    "algorithm.pretraining.settled": ppo.SETTLED_CHANGE,
    "algorithm.pretraining.window": ppo.CONVERGENCE_WINDOW,
    "recovery.backoff_seconds": restart_budget.BACKOFF_SECONDS,
    "recovery.max_backoff_seconds": restart_budget.MAX_BACKOFF_SECONDS,
    "recovery.restart_window_seconds": restart_budget.RESTART_WINDOW_SECONDS,
    "reward.terms.*.backoff_seconds": services.BACKOFF_SECONDS,
    "reward.terms.*.batch_wait_seconds": services.BATCH_WAIT_SECONDS,
    "reward.terms.*.breaker": {"failures": services.MAX_FAILURES, "cooldown_seconds": services.COOLDOWN_SECONDS},
}
FIXED = "algorithm: {type: vapo}\nreward: {terms: {x: {type: http, url: 'http://a'}}}\n"


def write_fixed(path: Path, pattern: str, value: object) -> str:
    """Write a configuration that sets a key of `FIXED_KEYS`; return the key."""
    tree = yaml.safe_load(MINIMAL + FIXED)
    node, (*parents, leaf) = tree, ["x" if part == "*" else part for part in pattern.split(".")]
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = value
    path.write_text(yaml.safe_dump(tree))
    return ".".join([*parents, leaf])


@pytest.mark.parametrize("pattern", FIXED_KEYS)
def test_a_key_that_is_a_constant_is_refused_by_its_name(write: Write, pattern: str) -> None:
    """Also with the value that it is fixed at, which the refusal names; a run's own file may have that one."""
    value, words = FIXED_KEYS[pattern]
    assert value == CONSTANTS[pattern]
    numbers = value.values() if isinstance(value, dict) else [value]
    assert [float(number) for number in re.findall(r"[\d.]+", words)] == list(numbers)
    path = write(MINIMAL)
    for other in (value, 7):
        key = write_fixed(path, pattern, other)
        refusal = f"{key} is no longer an option: it is fixed at {words}"
        assert problems(path) == [refusal]
        if other == value:
            config = load_resolved(path)
            assert load_resolved(write(dump_config(config))) == config
            with pytest.raises((AttributeError, KeyError)):
                at(config, key)
        else:
            with expect_error(ConfigError, refusal):
                load_resolved(path)


def test_all_problems_are_reported_together(write: Write) -> None:
    path = write("run_dir: x\nmodel: {}\ndata: {path: d, fields: {prompts: q}}\ntrainer: {steps: 0}\nseeds: 1\n")
    assert sorted(problems(path)) == [
        "data.fields.prompts: unknown key",
        "model.path: this key is required",
        "seeds: unknown key",
        "trainer.steps: Input should be greater than or equal to 1, got 0",
    ]


def test_paths_in_errors_do_not_contain_union_tags(write: Write) -> None:
    terms = "reward: {terms: {a: {type: numeric, bogus: 1}, b: {type: python}, c: {strict: true}, d: {type: nope}}}\n"
    assert sorted(problems(write(MINIMAL + terms))) == [
        "reward.terms.a.bogus: unknown key",
        "reward.terms.b.path: this key is required",
        "reward.terms.d.type: needs one of 'numeric', 'math', 'format', 'python', 'environment', 'code', 'http', "
        "'judge', 'model', got 'nope'",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\nrun_dir: a\nseed: 2\n", ":3: not valid YAML: key 'seed' is given twice"),
        ("trainer:\n  steps: 1\n  steps: 1\n", ":3: not valid YAML: key 'steps' is given twice"),
        ("run_dir: [a\nseed: 1\n", ":2: not valid YAML: "),
        ("? [1]\n: 2\n", ":1: not valid YAML: found unhashable key"),
        ("- a\n", ": needs a mapping at the top level, got list"),
        ("a: \x01\n", ": not valid YAML: unacceptable character"),
        (b"a: \xff\n", ": not valid UTF-8 at byte 3"),
    ],
)
def test_invalid_yaml_is_rejected(write: Write, content: str | bytes, message: str) -> None:
    path = write(content)
    (line,) = problems(path)
    assert f"{path}: {line}".startswith(f"{path}{message}") or line.startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps=010", "needs a number without leading zeros, which may mean octal, got 010"),
        ("trainer.steps=-010", "needs a number without leading zeros, which may mean octal, got -010"),
        ("trainer.steps='010'", "needs a number without leading zeros, which may mean octal, got 010"),
        ("trainer.steps=0_8", "needs a number without leading zeros, which may mean octal, got 0_8"),
        ("trainer.steps=0o10", "Input should be a valid integer"),
        ("trainer.steps=1:30", "Input should be a valid integer"),
        ("trainer.optimizer.lr=1:30.5", "Input should be a valid number"),
        ("trainer.steps=yes", "needs a number, got True, which YAML also reads from yes, no, on and off"),
        ("trainer.optimizer.lr=on", "needs a number, got True"),
        ("trainer.profile={steps: [1, off]}", "needs a number, got False"),
        ("rollout.engine.mem_fraction=true", "needs a number, got True"),
        ("reward.terms.a.weight=on", "needs a number, got True"),
        ("limits.max_skips_in_a_row=yes", "needs a number, got True"),
        ("algorithm.clip_ratio_low=yes", "needs a number, got True"),
        ("seed=" + "9" * 5000, "not valid YAML: "),
        ("trainer.optimizer.lr=" + "9" * 400, "Input should be a valid number"),
        ("trainer.optimizer.lr=1e400", "Input should be a finite number"),
        ("seed=2024-01-01", "Input should be a valid integer"),
    ],
)
def test_what_yaml_1_1_takes_for_other_numbers_is_refused(write: Write, override: str, message: str) -> None:
    (line,) = problems(write(MINIMAL), override)
    assert message in line
    assert line.startswith((override.partition("=")[0], f"--set {override}: not valid"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000), ("0x10", 16), ("1e3", 1000.0), (".5", 0.5), ("-.5", -0.5), ("'7'", "7"), ("1.2", 1.2),
        ("'1.2'", "1.2"), ("010", "010"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("=", "="), ("<<", "<<"),
        ('"\\ud83d\\ude00"', "\U0001f600"), ("yes", True), ("null", None), ("~/x", "~/x"),
    ],
)  # fmt: skip
def test_scalars(write: Write, text: str, value: object) -> None:
    kwargs = {"x": value}
    config = load_config(RunConfig, write(MINIMAL), [f"rollout.agent.kwargs.x={text}"])
    assert repr(config.rollout.agent.kwargs) == repr(kwargs)
    assert repr(load_config(RunConfig, write(dump_config(config))).rollout.agent.kwargs) == repr(kwargs)


YAML_1_2 = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
"""The numbers of YAML 1.2's core schema (10.3.2), except for infinity and NaN."""


@settings(max_examples=1000)
@given(
    text=st.text("0123456789_+-.:eExob", min_size=1, max_size=6).filter(
        lambda text: text[-1] not in ":-" and text != "..."
    )
)
def test_numbers_are_those_on_which_yaml_1_1_and_1_2_agree(text: str) -> None:
    number, yaml_1_1 = parse_yaml(text, "x"), yaml.safe_load(text)
    if isinstance(number, int | float):
        plain = text.replace("_", "")
        assert number == (int(plain, 0) if re.fullmatch("[-+]?(0[xb].*|[0-9]+)", plain) else float(plain))
        assert number == yaml_1_1 or (YAML_1_2.fullmatch(plain) and isinstance(yaml_1_1, str))
    elif YAML_1_2.fullmatch(text):
        assert re.match(r"[-+]?0[0-9o]", text), "only whole numbers with leading zeros, and 0o7, are left out"


MERGED = """
run_dir: r
model: {path: m}
data: {path: d}
trainer:
  optimizer: &adam {lr: 1e-6, warmup_steps: 5}
  parallel: &parallel {<<: &none {tp: 1}, pp: 1}
algorithm:
  type: ppo
  critic:
    optimizer: {<<: *adam, lr: 1e-5}
    parallel: {<<: [*parallel, {tp: 7, cp: 1}], cp: 1}
"""


def test_merge_keys_are_overridden_by_a_mappings_own(write: Write) -> None:
    config = load_config(RunConfig, write(MERGED))
    critic = at(config, "algorithm.critic")
    assert (critic.optimizer.lr, critic.optimizer.warmup_steps) == (1e-5, 5)
    assert (critic.parallel.tp, critic.parallel.pp, critic.parallel.cp) == (1, 1, 1), "the first of a list wins"
    assert config == load_config(RunConfig, write(dump_config(config)))
    assert read_tree(write(MERGED)) == yaml.safe_load(MERGED.replace("1e-", "1.0e-"))


def test_merged_mappings_may_be_nested_and_keep_their_own_values(write: Write) -> None:
    tree = read_tree(write("x: {y: &b {<<: &a {k: 1}, k: 2}}\nc: {<<: *b, z: 1}\nd: {<<: [*a, *b]}\n"))
    assert tree == {"x": {"y": {"k": 2}}, "c": {"k": 2, "z": 1}, "d": {"k": 1}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}\n", ":2: not valid YAML: key 'y' is given twice"),
        ("b: {<<: {x: 1}, <<: {y: 1}}\n", ":1: not valid YAML: key '<<' is given twice"),
        ("b: {<<: 3}\n", ":1: not valid YAML: expected a mapping or list of mappings for merging"),
        ('run_dir: "a\\ud800b"\n', ":1: not valid YAML: a text has an unpaired surrogate, such as \\ud800"),
        ("[" * 3000, ": not valid YAML: "),
        ("trainer: {steps: &s [*s]}\n", ": not valid YAML: Circular reference detected"),
        ("rollout: {agent: {kwargs: &k {a: *k}}}\n", ": not valid YAML: Circular reference detected"),
        ("seed: !!int abc\n", ": not valid YAML: invalid literal"),
    ],
)
def test_invalid_merges_and_texts_are_rejected(write: Write, content: str, message: str) -> None:
    path = write(content)
    with pytest.raises(ConfigError) as error:
        load_config(RunConfig, path)
    assert str(error.value).startswith(f"{path}{message}")


def test_missing_and_empty_files(write: Write, tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["cannot read the configuration: No such file or directory"]
    assert problems(write("")) == [f"{key}: this key is required" for key in ("run_dir", "model", "data")]


@pytest.mark.parametrize(
    ("overrides", "arithmetic"),
    [
        (["placement.slots_per_node=3", "trainer.parallel.tp=2"], "3 % 2 = 1"),
        (["placement={nodes: 2, slots_per_node: 3}", "trainer.parallel={tp: 2, pp: 2}"], "2 * 2 * 1 = 4, 6 % 4 = 2"),
        (["placement.slots_per_node=2", "rollout={tp: 2, replicas: 2}"], "2 * 2 = 4 > 2"),
        (["placement.nodes=2", "rollout.tp=2"], "rollout.tp = 2 > placement.slots_per_node = 1"),
        (["algorithm={prompts_per_step: 32, num_mini_batches: 5}"], "algorithm: num_mini_batches needs to divide"),
        (["trainer.parallel.vpp=2"], "trainer.parallel: vpp needs pp > 1, got vpp = 2 with pp = 1"),
        (["placement.slots_per_node=3", "trainer.parallel.cp=2"], "1 * 1 * 2 = 2, 3 % 2 = 1"),
        (["placement.slots_per_node=2", "trainer.parallel.ep=4"], "ep = 1 * 4 = 4, slots / pp = 2 / 1 = 2, 2 % 4 = 2"),
        (
            ["placement.slots_per_node=2", "trainer.parallel={tp: 2, ep: 2}"],
            "etp * ep = 2 * 2 = 4, slots / pp = 2 / 1 = 2, 2 % 4 = 2; etp defaults to tp",
        ),
        (["trainer.parallel.sequence_parallel=true"], "sequence_parallel needs tp > 1, got tp = 1"),
        (["reward.eval_term=style"], "reward: eval_term needs to be one of ['accuracy'], got 'style'"),
    ],
)
def test_impossible_sizes_show_the_arithmetic(write: Write, overrides: list[str], arithmetic: str) -> None:
    (line,) = problems(write(MINIMAL), *overrides)
    assert arithmetic in line


def test_a_union_without_type_uses_the_default_type(write: Write) -> None:
    config = load_config(RunConfig, write(MINIMAL), ["algorithm.group_size=4", "reward.terms.a.strict=true"])
    assert (config.algorithm.type, config.algorithm.group_size) == ("grpo", 4)
    assert config.reward.terms == {"a": NumericRewardConfig(strict=True)}


TERMS = "reward: {terms: {f: {type: format, pattern: '^\\d: #'}, p: {type: python, path: 'a:b', weight: 1e-2}}}\n"


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (RunConfig, ""),
        (SftConfig, "placement: {slots_per_node: 4}\ntrainer: {parallel: {tp: 2, pp: 2}}\n"),
        (RunConfig, TERMS),
    ],
)
def test_dump_and_load_round_trip(write: Write, kind: type[RunConfig] | type[SftConfig], extra: str) -> None:
    config = load_config(kind, write(MINIMAL + extra))
    assert load_config(kind, write(dump_config(config))) == config


@example(lr=1.0, template="0E0")
@settings(max_examples=40)
@given(lr=st.floats(min_value=1e-300, max_value=1e300), template=st.text(st.characters(codec="utf-8")))
def test_any_value_survives_dump_and_load(tmp_path_factory: pytest.TempPathFactory, lr: float, template: str) -> None:
    config = make_run(data={"path": "d", "prompt_template": template}, trainer={"optimizer": {"lr": lr}})
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(RunConfig, path) == config


def test_a_configuration_is_frozen(write: Write) -> None:
    config = load_config(RunConfig, write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_sft_has_neither_rollout_nor_offload(write: Write) -> None:
    assert problems(write(MINIMAL + "rollout: {tp: 1}\n"), kind=SftConfig) == ["rollout: unknown key"]
    with expect_error(ConfigError, "trainer.offload"):
        load_config(SftConfig, write(MINIMAL), ["trainer.offload.optimizer=true"])
    allowed = load_config(SftConfig, write(MINIMAL), ["trainer.offload.optimizer=false"])
    assert allowed.trainer.offload.optimizer is False


@pytest.mark.parametrize(
    ("text", "overrides", "placement"),
    [
        ("", [], (2, 4)),
        ("placement: {device: cpu}\n", ["trainer.parallel.tp=4"], (2, 4)),
        ("placement: {slots_per_node: 3}\n", [], (1, 3)),
        ("", ["placement.nodes=2"], (2, 1)),
    ],
)
def test_slots_of_the_world_are_the_default_placement(
    write: Write, text: str, overrides: list[str], placement: tuple[int, int]
) -> None:
    config = load_config(SftConfig, write(MINIMAL + text), overrides, slots=(2, 4))
    assert (config.placement.nodes, config.placement.slots_per_node) == placement
    assert config.placement.device == ("cpu" if "cpu" in text else "auto")


@pytest.mark.parametrize("command", STAGES)
def test_a_dumped_configuration_loads_with_its_type(write: Write, command: str) -> None:
    config = make_config(STAGES[command], REQUIRED | {"checkpoint": {"every": 7}})
    found = load_resolved(write(dump_config(config)))
    assert (found, type(found), command_of(found)) == (config, STAGES[command], command)
    assert found.checkpoint.every == 7


KEYS = (
    "model.path", "data.path", "algorithm.type", "algorithm.group_size", "trainer.parallel.tp", "trainer.parallel.pp",
    "trainer.parallel.cp", "trainer.parallel.ep", "trainer.parallel.vpp", "trainer.optimizer.lr", "rollout.tp",
    "rollout.replicas", "rollout.max_new_tokens", "weight_sync.strategy", "placement", "seed",
)  # fmt: skip
"""Keys that recipes, scripts and documentation rely on."""


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


@pytest.mark.parametrize("key", KEYS)
def test_key_exists(key: str) -> None:
    kinds: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
        assert fields, f"{key}: no {name}"
        kinds = [section for field in fields for section in sections(field.annotation)]


def test_every_recipe_loads_and_round_trips(write: Write) -> None:
    for recipe in sorted((Path(__file__).parents[2] / "yaml").glob("**/*.yaml")):
        kind = next((kind for stage, kind in STAGES.items() if stage in recipe.stem.split("-")), RunConfig)
        config = load_config(kind, recipe)
        assert load_config(kind, write(dump_config(config))) == config
