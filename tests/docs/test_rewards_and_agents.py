"""docs/rewards-and-agents.md against the code: reward types and their numbers, members of an episode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from megarl.config.reward import FormatRewardConfig, ModelRewardConfig, NumericRewardConfig, PythonRewardConfig
from megarl.config.reward_code import CodeRewardConfig
from megarl.config.reward_services import HttpRewardConfig, JudgeRewardConfig
from megarl.reward.python_term import MAX_THREADS
from megarl.rollout.agents.episode import Episode
from tests.docs.tables import code, section, tables

PAGE = (Path(__file__).parents[2] / "docs/rewards-and-agents.md").read_text()
TERMS = (
    NumericRewardConfig,
    FormatRewardConfig,
    PythonRewardConfig,
    CodeRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    ModelRewardConfig,
)
RULES = TERMS[:-1]


def test_every_reward_type_has_a_row_and_an_excerpt() -> None:
    first, *_ = tables(section(PAGE, "Rewards"))
    kinds = [str(get_args(term.model_fields["type"].annotation)[0]) for term in TERMS]
    assert [row[0].strip("`") for row in first[1:]] == kinds
    assert all(re.search(rf"^ +type: {kind}$", PAGE, re.MULTILINE) for kind in kinds)


def test_numbers_are_those_of_the_code() -> None:
    seconds = {term: term.model_fields["timeout_seconds"].default for term in RULES}
    assert seconds == dict.fromkeys(RULES, 30.0) | {NumericRewardConfig: 5.0, CodeRewardConfig: 120.0}
    assert "(default: 30, `numeric`: 5, `code`: 120;" in PAGE
    assert PAGE.count(f"{MAX_THREADS} threads") == PAGE.count(f"{MAX_THREADS} such calls") == 1


def test_defaults_of_on_error_are_those_of_the_code() -> None:
    actions = [term.model_fields["on_error"].default for term in RULES]
    assert actions == ["drop"] * len(RULES)
    assert {"`drop` (default)", "`raise`"} <= {
        row[0] for table in tables(section(PAGE, "Timeouts and errors")) for row in table
    }


def test_members_of_an_episode_exist() -> None:
    first, *_ = tables(section(PAGE, "Agents"))
    members = [re.match(r"(?:await )?(\w+)", span) for row in first[1:] for span in code(row[0])]
    names = {member[1] for member in members if member is not None}
    public = {name for name in vars(Episode) if not name.startswith("_")}
    attributes = set(re.findall(r"self\.(\w+)(?:: [^=]+)? = ", Path(Episode.__init__.__code__.co_filename).read_text()))
    assert names <= public | attributes
    assert public - {"max_num_tokens"} <= names
