"""NeMo-RL's data sets by name and by path, and the files and fields that they are in megarl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megarl.importing.tables import NotConvertible, Refused, Settings

PLACEHOLDER = "DATA.jsonl"
"""Path in a configuration whose data has to be written first."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Ends of names of files, which are no data sets on the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set that NeMo-RL loads by name from the hub."""

    files: str
    """Path of its files, with `{split}` and `{subset}`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Key of `data.fields` -> name; those of the answers of RL, which SFT trains on, are `output`."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Other keys of a configuration."""
    split: str = "train"
    subset: str = ""
    subsets: Mapping[str, str] = field(default_factory=dict)
    """Name of a subset -> its part of the path, if that is not the name."""
    held_out_share: float = 0.0
    """Share of the rows that is held out by default where there are no other held-out rows."""
    difference: str = ""
    """What the class does with rows that megarl does not do."""
    stages: tuple[str, ...] = ("train", "sft")
    """Commands that the rows are for."""


_MATH: Mapping[str, str] = {"prompt": "problem", "output": "answer"}
_DAPO: Mapping[str, str] = {"prompt": "prompt.0.content", "output": "reward_model.ground_truth"}
_GSM8K = Dataset(
    files="hf://datasets/openai/gsm8k/{subset}/{split}-*.parquet",
    fields={"prompt": "question", "output": "answer"},
    subset="main",
)

DATASETS: Mapping[str, Dataset] = {
    "AIME2024": Dataset(files="hf://datasets/HuggingFaceH4/aime_2024/data/train-*.parquet", fields=_MATH),
    "AIME2025": Dataset(
        files="hf://datasets/opencompass/AIME2025/aime2025-*.jsonl", fields={"prompt": "question", "output": "answer"}
    ),
    "AIME2026": Dataset(files="hf://datasets/MathArena/aime_2026/data/train-*.parquet", fields=_MATH),
    "DAPOMath17K": Dataset(
        files="hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet", fields=_DAPO
    ),
    "DAPOMathAIME2024": Dataset(files="hf://datasets/BytedTsinghua-SIA/AIME-2024/data/aime-2024.parquet", fields=_DAPO),
    "DeepScaler": Dataset(files="hf://datasets/agentica-org/DeepScaleR-Preview-Dataset/deepscaler.json", fields=_MATH),
    "GSM8K": _GSM8K,
    "gsm8k": _GSM8K,
    "HelpSteer3": Dataset(files="hf://datasets/nvidia/HelpSteer3/preference/{split}.jsonl*", stages=("rm", "dpo")),
    "NuminaMath-1.5": Dataset(
        files="hf://datasets/AI-MO/NuminaMath-1.5/data/train-*.parquet",
        fields=_MATH,
        difference="NeMo-RL leaves out rows without an answer that can be compared, and those that are not marked as "
        "valid: write the others to a file",
    ),
    "OpenMathInstruct-2": Dataset(
        files="hf://datasets/nvidia/OpenMathInstruct-2/data/{split}-*.parquet",
        fields={"prompt": "problem", "output": "expected_answer"},
        split="train_1M",
        held_out_share=0.05,
    ),
    "OpenR1-Math-220k": Dataset(
        files="hf://datasets/open-r1/OpenR1-Math-220k/{subset}/train-*.parquet",
        fields=_MATH,
        subset="default",
        subsets={"default": "data"},
    ),
    "squad": Dataset(
        files="hf://datasets/rajpurkar/squad/plain_text/{split}-*.parquet",
        fields={"prompt": "question", "output": "answers.text.0"},
        more={"data.prompt_template": "{context}\n\n{question}"},
        difference="NeMo-RL has the context in a system message; here it precedes the question",
    ),
    "Tulu3Preference": Dataset(
        files="hf://datasets/allenai/llama-3.1-tulu-3-8b-preference-mixture/data/train-*.parquet", stages=("rm", "dpo")
    ),
    "tulu3_sft_mixture": Dataset(
        files="hf://datasets/allenai/tulu-3-sft-mixture/data/train-*.parquet", held_out_share=0.05, stages=("sft",)
    ),
}
"""Names of NeMo-RL's registries of responses and preferences whose rows megarl reads as they are published."""

BY_PATH = ("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format", "NemoGymDataset")
"""Names that stand for the file, or the data set on the hub, in data_path."""

MEDIA_NAMES = (
    *("audiomcq", "avqa", "clevr-cogent", "daily-omni", "geometry3k", "intent-bench", "intent-train"),
    *("mmpr-tiny", "refcoco"),
)
"""Names of data sets of images, videos and audio."""

TEXT_NAMES: Mapping[str, str] = {
    "open_assistant": "write the conversations of its trees as `messages`, one per row",
    "Nemotron-Cascade-2-SFT-Math": "name its files on the hub, which have `messages`: "
    "hf://datasets/nvidia/Nemotron-Cascade-2-SFT-Data/FILE",
    "arrow_text": "its rows are texts of pretraining, without prompts: write them as `messages`",
    "general-conversation-jsonl": "write its rows as `messages`; megarl takes no images, videos or audio",
}
"""Other names -> what to do."""

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

READ_KEYS = (
    *("dataset_name", "data_path", "split", "subset", "system_prompt", "extract_answer"),
    *("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key", "tool_key", "system_key"),
)
"""Keys of a data set that its conversion reads."""


def entries(s: Settings, section: str) -> list[dict[str, object]]:
    """Return the settings of each data set in `data.train` or `data.validation`, those of `data.default` included."""
    defaults = {setting.key.removeprefix("data.default."): setting.value for setting in s.matching("data.default.*")}
    whole = s.value(f"data.{section}") if s.is_given(f"data.{section}") else None
    if isinstance(whole, list):
        return [{**defaults, **each} for each in whole if isinstance(each, dict)]
    prefix = f"data.{section}."
    given = {setting.key.removeprefix(prefix): setting.value for setting in s.matching(f"{prefix}*")}
    name = s.text(f"{prefix}dataset_name")
    if not given and (s.is_given(f"data.{section}") or name is None):
        return []
    if "data_path" in given or "dataset_name" in given or "dataset_name" in defaults:
        return [{**defaults, **given}]
    split = s.text(f"{prefix}split")
    of_defaults = {"dataset_name": name, **({} if split is None else {"split": split})}
    return [{**of_defaults, **defaults, **given}]


@dataclass(slots=True, kw_only=True)
class Source:
    """Files and fields of one data set, and what could not be converted."""

    path: str
    fields: dict[str, str] = field(default_factory=dict)
    """Key of `data.fields` -> name."""
    more: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_entry(entry: Mapping[str, object], stage: str, key: str) -> Source:
    """Return the source of a data set.

    Args:
        stage: command of megarl.
        key: key of the section, for messages.

    Raises:
        Refused: the data set has images, videos or audio.
    """
    name, path = _text(entry, "dataset_name"), _text(entry, "data_path")
    if name in MEDIA_NAMES:
        raise Refused(
            f"{key}.dataset_name", f"the data set {name} has images, videos or audio, which megarl's models do not take"
        )
    if name is not None and name in DATASETS:
        return _named(name, DATASETS[name], entry, stage)
    if path and (not name or name in BY_PATH):
        return _from_path(name or "", path, entry, stage)
    source = Source(path=f"{name or 'DATA'}.jsonl")
    if name is not None and name in TEXT_NAMES:
        advice = TEXT_NAMES[name]
    elif name and "." in name:
        advice = "it is a class of yours: write its rows to a file"
    else:
        advice = "write it as JSONL or Parquet, or name its files on the hub, hf://"
    source.problems.append(f"megarl has no data set by the name {name or PLACEHOLDER}: {advice}")
    return source


def _named(name: str, known: Dataset, entry: Mapping[str, object], stage: str) -> Source:
    subset = _text(entry, "subset") or known.subset
    path = known.files.format(
        split=_text(entry, "split") or known.split, subset=known.subsets.get(subset, subset) or subset
    )
    names = dict(known.fields)
    output = names.pop("output", None)
    if "output" in known.fields and name == "OpenMathInstruct-2":
        output = _text(entry, "output_key") or output
    source = Source(path=path, fields=names, more=dict(known.more))
    if output is not None:
        source.fields["response" if stage == "sft" else "answer"] = output
    if stage not in known.stages:
        what = {"train": "reference answers", "sft": "a column of the answer to train on"}.get(stage, "pairs")
        source.problems.append(
            f"the rows of the data set {name}, which are for megarl {' and megarl '.join(known.stages)}, lack {what}"
        )
    if known.difference:
        source.problems.append(f"the data set {name}: {known.difference}")
    if known is _GSM8K and stage == "sft" and entry.get("extract_answer", True):
        source.problems.append(f"the data set {name}: NeMo-RL trains on what follows #### alone, megarl on the answer")
    if entry.get("data_path"):
        source.problems.append(f"NeMo-RL loads the data set {name}, not the file of data_path")
    return source


def _from_path(name: str, path: str, entry: Mapping[str, object], stage: str) -> Source:
    source = Source(path=path)
    if HUB_ID.fullmatch(path) and not path.lower().removesuffix(".gz").endswith(SUFFIXES):
        folder, split = _text(entry, "subset") or "data", _text(entry, "split") or "train"
        source.path = f"hf://datasets/{path}/{folder}/{split}-*.parquet"
        source.problems.append(f"{path} is a data set on the hub: check the names of its files in the path")
    if name == "NemoGymDataset":
        return source
    if name == "openai_format":
        wanted = {"messages": _text(entry, "chat_key"), "tools": _text(entry, "tool_key")}
        source.fields = {key: value for key, value in wanted.items() if value is not None}
        if system := _text(entry, "system_prompt"):
            source.more["data.system_prompt"] = system
        if (column := _text(entry, "system_key")) not in (None, "system"):
            source.problems.append(f"megarl reads a system message from the column system: rename {column}")
        return source
    if stage in ("rm", "dpo"):
        if name == "PreferenceDataset":
            return source
        keys = ("prompt", "chosen", "rejected")
        source.fields = {key: text for key in keys if (text := _text(entry, f"{key}_key")) is not None}
        return source
    output = "response" if stage == "sft" else "answer"
    own = {"prompt": _text(entry, "input_key"), output: _text(entry, "output_key")}
    default = {"prompt": "input", output: "output"} if name == "ResponseDataset" else {}
    source.fields = {key: text for key in own if (text := own[key] or default.get(key)) is not None}
    return source


def convert_data(s: Settings, stage: str) -> Mapping[str, object]:
    """Return the training data of a stage: one file, or several in fixed ratios."""
    found = [read_entry(entry, stage, "data.train") for entry in entries(s, "train")]
    if not found:
        raise NotConvertible("no data set is named: set data.path", {"data.path": PLACEHOLDER})
    problems = [problem for source in found for problem in source.problems]
    if len(found) == 1 or stage != "train":
        values = _as_values(found[0])
        if len(found) > 1:
            problems.append(
                f"megarl {stage} reads one file or folder: write all data sets to it; this is the first one"
            )
    else:
        values = dict(_as_sources(found))
        problems.append(
            "NeMo-RL concatenates its data sets; data.sources has equal ratios: set them to the shares of rows"
        )
    if problems:
        raise NotConvertible("; ".join(dict.fromkeys(problems)), values)
    return values


def _as_values(source: Source) -> dict[str, object]:
    return {"data.path": source.path, **{f"data.fields.{k}": v for k, v in source.fields.items()}, **source.more}


def _as_sources(found: list[Source]) -> Iterator[tuple[str, object]]:
    each = round(1 / len(found), 4)
    for i, source in enumerate(found):
        section = f"data.sources.train{i}"
        yield f"{section}.path", source.path
        yield f"{section}.ratio", each if i else round(1 - each * (len(found) - 1), 4)
        for key, name in source.fields.items():
            yield f"{section}.fields.{key}", name
        for key, value in source.more.items():
            yield key.replace("data.", f"{section}.", 1), value


def convert_eval_data(s: Settings, stage: str) -> Mapping[str, object]:
    """Return the file of held-out rows, whose fields need to be those of the training rows."""
    found = [read_entry(entry, stage, "data.validation") for entry in entries(s, "validation")]
    if not found:
        return {}
    first, training = found[0], [read_entry(entry, stage, "data.train") for entry in entries(s, "train")]
    several = stage == "train" and len(training) > 1
    values: dict[str, object] = {"data.sources.train0.eval_path" if several else "data.eval_path": first.path}
    problems = [problem for source in found for problem in source.problems]
    if len(found) > 1:
        problems.append("megarl evaluates on one file, or one of each source: this is the first data set")
    if training and (first.fields, first.more) != (training[0].fields, training[0].more):
        named = ", ".join(f"{key} {name!r}" for key, name in first.fields.items()) or "the default names"
        problems.append(
            f"held-out rows have the fields of training rows in megarl, and {first.path} has {named}: write it with "
            "those"
        )
    if problems:
        raise NotConvertible("; ".join(dict.fromkeys(problems)), values)
    return values


def convert_split(s: Settings) -> Mapping[str, object]:
    """Return nothing: megarl holds out rows of a file of their own, not a share of the training rows."""
    if entries(s, "validation"):
        return {}
    for entry in entries(s, "train"):
        known = DATASETS.get(_text(entry, "dataset_name") or "")
        share = entry.get("split_validation_size", known.held_out_share if known else 0)
        if isinstance(share, int | float) and share:
            size = f"{share:g} of the rows" if share < 1 else f"{int(share)} rows"
            raise NotConvertible(f"megarl holds out no rows of data.path: write {size} to a file, data.eval_path")
    return {}


def text_key(key: str) -> str:
    """Return the key under which the settings have the content of the file that `key` names."""
    return f"text of {key}"


PROMPT_FILES = ("prompt_file", "system_prompt_file")


def convert_prompt_files(s: Settings, stage: str) -> Mapping[str, object]:
    """Return the prompt template and the system prompt that files of the user's hold."""
    values: dict[str, object] = {}
    problems = []
    training = [read_entry(entry, stage, "data.train") for entry in entries(s, "train")]
    for name, to in zip(PROMPT_FILES, ("data.prompt_template", "data.system_prompt"), strict=True):
        key = next((k for part in ("train", "default") if s.text(k := f"data.{part}.{name}")), None)
        if key is None:
            continue
        text = s.text(text_key(key))
        if text is None:
            problems.append(f"copy the text of {s.text(key)} to {to}{', with {prompt}' if 'template' in to else ''}")
        elif to == "data.system_prompt":
            values[to] = text
        elif (template := _as_template(text, training[0].more.get(to) if training else None)) is None:
            problems.append(f"{s.text(key)} has no single place {{}} for the prompt: write it as {to}")
        else:
            values[to] = template
    if problems:
        raise NotConvertible("; ".join(problems), values)
    return values


def _as_template(text: str, around: object) -> str | None:
    """Return a format string of Python with one place as a prompt template; None if it has another number of them.

    Args:
        around: prompt template of the data set's own, with the place `{question}`; None: it has none.
    """
    name = "{prompt}" if around is None else "{question}"
    try:
        filled = text.format(name)
    except (IndexError, KeyError, ValueError):
        return None
    if filled.count(name) != 1:
        return None
    return filled if around is None else str(around).replace(name, filled)


def convert_repeat(s: Settings) -> Mapping[str, object]:
    """Return the completions of each held-out prompt, where NeMo-RL repeats the rows."""
    own = next((n for head in ("grpo", "ppo") if (n := s.whole(f"{head}.val_num_generations_per_prompt"))), 1)
    found = [each for entry in entries(s, "validation") if isinstance(each := entry.get("repeat"), int) and each > 1]
    return {"eval.samples": found[0] * own} if found else {}


def convert_eval_size(s: Settings, key: str) -> Mapping[str, object]:
    """Return the number of held-out rows that are evaluated on; `key` has it."""
    size = s.whole(key)
    if size is None or size < 1:
        return {}
    if len(entries(s, "train")) > 1:
        return {"data.sources.train0.eval_size": size} if entries(s, "validation") else {}
    return {"data.eval_size": size}


def _text(entry: Mapping[str, object], key: str) -> str | None:
    value = entry.get(key)
    return None if value is None else str(value)
