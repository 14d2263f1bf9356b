"""The date in chat templates: one for a run, its resumes, evaluations and environments, whatever the day is."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as hf_templates

from megarl.batch.trajectory import Prompt
from megarl.config import DpoConfig, RmConfig, RunConfig, SftConfig, StageConfig, load_resolved
from megarl.config import data as data_config
from megarl.config.load import make_config
from megarl.controller.actor import Controller
from megarl.controller.run_stage import prepare_folder, resolve_and_check, run_stage
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preference_pairs import load_preferences
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError
from megarl.rollout.environments.conversation import ChatRenderer
from megarl.rollout.journal import FinishedJob, Journal, open_journal
from megarl.run.remote.build import read_prompts
from tests.cli.tiny_run import write_rows, write_tiny_run
from tests.errors import expect_error
from tests.rollout.environments.chat_templates import APPEND
from tests.rollout.test_journal import finished_group
from tests.rollout.whole_batches import make_group_job

TEMPLATE = "{{ strftime_now('%d %b %Y') }}\n" + APPEND
FIRST, LATER = datetime.date(2026, 7, 26), datetime.date(2026, 7, 27)
Tree = dict[str, object]
SetDay = Callable[[datetime.date], None]


@pytest.fixture
def set_day(monkeypatch: pytest.MonkeyPatch) -> SetDay:
    """Return a function that sets the current day, for megarl and for transformers."""

    def set_day(day: datetime.date) -> None:
        class Date(datetime.date):
            @classmethod
            def today(cls) -> datetime.date:
                return day

        class Datetime(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
                return datetime.datetime.combine(day, datetime.time(12), tz)

        monkeypatch.setattr(data_config, "date", Date)
        monkeypatch.setattr(hf_templates, "datetime", Datetime)

    return set_day


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """Return the content of a run's YAML file; its model has a template with a date."""
    folder = tmp_path_factory.mktemp("dated")
    tree = write_tiny_run(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": "a", "response": "b", "chosen": "c", "rejected": "d", "answer": "1"}] * 8
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "heldout.jsonl", rows)
    yield tree
    shutil.rmtree(folder)


def make(kind: type[StageConfig], world: Tree, run_dir: Path, *overrides: str) -> StageConfig:
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in world.items()}
    if kind is not RunConfig:
        del tree["rollout"]
    sections = {RmConfig: ["rm={}"], DpoConfig: ["dpo={}"]}.get(kind, [])
    return make_config(kind, tree, [f"run_dir={run_dir}", *sections, *overrides])


def read(config: RunConfig) -> list[Prompt]:
    prompts = read_prompts(config, None)
    return [*prompts.training, *prompts.held_out]


def test_a_resumed_run_finds_its_groups_on_another_day(world: Tree, tmp_path: Path, set_day: SetDay) -> None:
    set_day(FIRST)
    begun = resolve_and_check(make(RunConfig, world, tmp_path / "run"))
    assert isinstance(begun, RunConfig)
    prepare_folder(begun, "train", ())
    prompts = read(begun)
    assert prompts[0].text.startswith("26 Jul 2026\n")
    job = make_group_job(prompts[0], group_id=0, num_samples=2, request_id="step-1-0")
    open_journal(begun).append(1, [FinishedJob(job, *finished_group(job))])

    set_day(LATER)
    resumed = resolve_and_check(make(RunConfig, world, tmp_path / "run"), resume="auto")
    assert isinstance(resumed, RunConfig)
    assert resumed.data == begun.data
    assert read(resumed) == prompts
    (entry,) = open_journal(resumed).lookup(1, [replace(job, prompt=read(resumed)[0])])
    assert entry is not None

    new = resolve_and_check(make(RunConfig, world, tmp_path / "run"))
    assert isinstance(new, RunConfig)
    assert read(new)[0].text.startswith("27 Jul 2026\n")
    journal = Journal(new.run_dir, open_journal(begun)._fingerprint)
    assert journal.lookup(1, [replace(job, prompt=read(new)[0])]) == [None]


@pytest.mark.parametrize("kind", [SftConfig, RmConfig, DpoConfig])
def test_supervised_stages_keep_their_date(
    kind: type[StageConfig], world: Tree, tmp_path: Path, set_day: SetDay
) -> None:
    def tokens(config: StageConfig) -> list[int]:
        tokenizer = load_tokenizer(config.model.path)
        if isinstance(config, SftConfig):
            return load_demonstrations(config.data, tokenizer, max_tokens=99)[0].token_ids.tolist()
        return load_preferences(config.data, tokenizer, max_tokens=99)[0].chosen.token_ids.tolist()

    set_day(FIRST)
    begun = resolve_and_check(make(kind, world, tmp_path / "run"))
    prepare_folder(begun, kind.__name__.removesuffix("Config").lower(), ())
    expected = tokens(begun)
    set_day(LATER)
    assert tokens(resolve_and_check(make(kind, world, tmp_path / "run"), resume="auto")) == expected
    assert tokens(resolve_and_check(make(kind, world, tmp_path / "run"))) != expected


def test_an_evaluation_has_the_date_of_the_run_in_its_folder(
    world: Tree, tmp_path: Path, set_day: SetDay, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[StageConfig] = []
    monkeypatch.setattr(
        "megarl.controller.run_stage.run_on_cluster", lambda config, *args, **options: found.append(config)
    )
    set_day(FIRST)
    run_stage(make(RunConfig, world, tmp_path / "run"), Controller.train)
    set_day(LATER)
    run_stage(make(RunConfig, world, tmp_path / "run"), Controller.evaluate, begins_run=False)
    run_stage(make(RunConfig, world, tmp_path / "other"), Controller.evaluate, begins_run=False)
    assert [config.data.template_date for config in found] == [FIRST, FIRST, LATER]


def test_a_date_in_the_configuration_takes_precedence(world: Tree, tmp_path: Path, set_day: SetDay) -> None:
    set_day(FIRST)
    config = resolve_and_check(make(SftConfig, world, tmp_path / "run", "data.template_date=2024-12-06"))
    prepare_folder(config, "sft", ())
    assert load_resolved(tmp_path / "run" / "sft.yaml").data.template_date == datetime.date(2024, 12, 6)
    same, other = (
        make(SftConfig, world, tmp_path / "run", *given) for given in ([], ["data.template_date=2024-12-07"])
    )
    assert resolve_and_check(same, resume="auto").data.template_date == datetime.date(2024, 12, 6)
    assert resolve_and_check(other, resume="auto").data.template_date == datetime.date(2024, 12, 7)


def test_environments_have_the_date_of_their_prompts(world: Tree, tmp_path: Path, set_day: SetDay) -> None:
    set_day(FIRST)
    config = make(RunConfig, world, tmp_path / "run")
    tokenizer = load_tokenizer(config.model.path)
    set_day(LATER)
    renderer = ChatRenderer(tokenizer, config.data.template_date)
    assert renderer.render([{"role": "user", "content": "a"}]).startswith("26 Jul 2026\n")
    assert isinstance(config, RunConfig)
    assert read(config)[0].text.startswith("26 Jul 2026\n")


@pytest.mark.parametrize("value", ["2026-13-02", "20260102", "today", "1", "true", "2026-01-02 03:00:00"])
def test_what_is_no_date_is_refused(value: str, world: Tree, tmp_path: Path) -> None:
    with expect_error(ConfigError, "data.template_date", "YYYY-MM-DD"):
        make(SftConfig, world, tmp_path, f"data.template_date={value}")
