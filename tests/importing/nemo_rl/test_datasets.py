"""NeMo-RL's data sets by name and path: files and fields as its classes read them, worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from megarl.data.data_files import HUB_FILE
from megarl.errors import ConfigError
from megarl.importing.conversion import Conversion, import_run
from megarl.importing.nemo_rl.datasets import DATASETS, MEDIA_NAMES


def convert(folder: Path, text: str) -> Conversion:
    file = folder / "run.yaml"
    file.write_text(text)
    return import_run("nemo-rl", file, {})


def data_of(conversion: Conversion) -> dict[str, Any]:
    data = conversion.tree()["data"]
    assert isinstance(data, dict)
    return data


def report_of(conversion: Conversion) -> str:
    return conversion.yaml().replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("section", "train", "path", "fields"),
    [
        ("grpo", "DeepScaler", "agentica-org/DeepScaleR-Preview-Dataset/deepscaler.json", ("problem", "answer")),
        (
            "grpo",
            "DAPOMath17K",
            "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet",
            ("prompt.0.content", "reward_model.ground_truth"),
        ),
        (
            "grpo",
            "OpenMathInstruct-2, split: train_2M",
            "nvidia/OpenMathInstruct-2/data/train_2M-*.parquet",
            ("problem", "expected_answer"),
        ),
        ("grpo", "AIME2025", "opencompass/AIME2025/aime2025-*.jsonl", ("question", "answer")),
        ("ppo", "gsm8k, split: test", "openai/gsm8k/main/test-*.parquet", ("question", "answer")),
        ("grpo", "GSM8K, subset: socratic", "openai/gsm8k/socratic/train-*.parquet", ("question", "answer")),
        ("grpo", "OpenR1-Math-220k", "open-r1/OpenR1-Math-220k/data/train-*.parquet", ("problem", "answer")),
        (
            "grpo",
            "OpenR1-Math-220k, subset: extended",
            "open-r1/OpenR1-Math-220k/extended/train-*.parquet",
            ("problem", "answer"),
        ),
        (
            "sft",
            "OpenMathInstruct-2, output_key: generated_solution",
            "nvidia/OpenMathInstruct-2/data/train_1M-*.parquet",
            ("problem", "generated_solution"),
        ),
        (
            "sft",
            "squad, split: validation",
            "rajpurkar/squad/plain_text/validation-*.parquet",
            ("question", "answers.text.0"),
        ),
        ("sft", "tulu3_sft_mixture", "allenai/tulu-3-sft-mixture/data/train-*.parquet", None),
        ("dpo", "Tulu3Preference", "allenai/llama-3.1-tulu-3-8b-preference-mixture/data/train-*.parquet", None),
        ("rm", "HelpSteer3, split: validation", "nvidia/HelpSteer3/preference/validation.jsonl*", None),
    ],
)
def test_data_sets_by_name(tmp_path: Path, section: str, train: str, path: str, fields: tuple[str, str] | None) -> None:
    text = f"{section}: {{max_num_steps: 5}}\ndata: {{train: {{dataset_name: {train}}}, validation: null}}\n"
    conversion = convert(tmp_path, text)
    data, output = data_of(conversion), "response" if section == "sft" else "answer"
    assert data["path"] == f"hf://datasets/{path}"
    assert data.get("fields") == (None if fields is None else {"prompt": fields[0], output: fields[1]})
    assert not conversion.problems


def test_paths_of_all_names_are_files_on_the_hub() -> None:
    for known in DATASETS.values():
        assert HUB_FILE.fullmatch(known.files.format(split="train", subset="main")), known.files


@pytest.mark.parametrize("name", MEDIA_NAMES)
def test_data_sets_of_media_are_refused_by_name(tmp_path: Path, name: str) -> None:
    text = f"grpo: {{max_num_steps: 5}}\ndata:\n  train:\n    dataset_name: {name}\n"
    with pytest.raises(
        ConfigError, match=rf"run.yaml:4: data.train.dataset_name={name} is refused: .* data set {name}"
    ):
        convert(tmp_path, text)


@pytest.mark.parametrize(
    ("section", "train", "reported"),
    [
        ("sft", "{dataset_name: open_assistant}", "no data set by the name open_assistant: write the conversations"),
        ("grpo", "{dataset_name: my_pkg.data.Puzzles}", "by the name my_pkg.data.Puzzles: it is a class of yours"),
        ("grpo", "{dataset_name: Sudoku}", "by the name Sudoku: write it as JSONL"),
        ("grpo", "{dataset_name: NuminaMath-1.5}", "data set NuminaMath-1.5: NeMo-RL leaves out rows"),
        (
            "grpo",
            "{dataset_name: HelpSteer3}",
            "data set HelpSteer3, which are for megarl rm and megarl dpo, lack reference",
        ),
        ("sft", "{dataset_name: gsm8k}", "data set gsm8k: NeMo-RL trains on what follows ####"),
        ("sft", "{dataset_name: squad}", "data set squad: NeMo-RL has the context in a system message"),
        ("grpo", "{dataset_name: DeepScaler, data_path: /d/x.jsonl}", "loads the data set DeepScaler, not the file"),
        ("grpo", "{dataset_name: OpenMathInstruct-2}", "holds out no rows of data.path: write 0.05 of the rows"),
        ("grpo", "{dataset_name: ResponseDataset, data_path: org/name}", "org/name is a data set on the hub"),
        ("sft", "[{dataset_name: squad}, {dataset_name: gsm8k}]", "megarl sft reads one file or folder"),
        ("sft", "{dataset_name: tulu3_sft_mixture, max_samples: 100}", "shorten the file"),
    ],
)
def test_what_differs_names_the_data_set(tmp_path: Path, section: str, train: str, reported: str) -> None:
    text = f"{section}: {{max_num_steps: 5}}\ndata: {{train: {train}, validation: null}}\n"
    assert reported in report_of(convert(tmp_path, text))


@pytest.mark.parametrize(
    ("section", "train", "fields"),
    [
        ("grpo", "{data_path: /d/x.jsonl, dataset_name: ResponseDataset}", {"prompt": "input", "answer": "output"}),
        ("sft", "{data_path: /d/x.jsonl, input_key: q}", {"prompt": "q"}),
        (
            "sft",
            "{data_path: /d/x.jsonl, dataset_name: openai_format, chat_key: chat, tool_key: functions}",
            {"messages": "chat", "tools": "functions"},
        ),
        ("grpo", "{data_path: /d/x.jsonl, dataset_name: NemoGymDataset}", None),
        ("dpo", "{data_path: /d/x.jsonl, dataset_name: PreferenceDataset}", None),
        ("dpo", "{data_path: /d/x.jsonl, dataset_name: BinaryPreferenceDataset, prompt_key: q}", {"prompt": "q"}),
    ],
)
def test_files_by_path(tmp_path: Path, section: str, train: str, fields: dict[str, str] | None) -> None:
    text = f"{section}: {{max_num_steps: 5}}\ndata: {{train: {train}, validation: null}}\n"
    data = data_of(convert(tmp_path, text))
    assert data["path"] == "/d/x.jsonl"
    assert data.get("fields") == fields


def test_several_data_sets_become_sources_with_equal_ratios(tmp_path: Path) -> None:
    conversion = convert(
        tmp_path,
        "grpo: {max_num_steps: 5, max_val_samples: 64}\n"
        "data:\n"
        "  train: [{dataset_name: DeepScaler}, {dataset_name: DAPOMath17K}, {dataset_name: AIME2025}]\n"
        "  validation: {dataset_name: AIME2024, repeat: 16}\n",
    )
    sources = data_of(conversion)["sources"]
    assert [source["ratio"] for source in sources.values()] == [0.3334, 0.3333, 0.3333]
    assert sources["train0"]["eval_path"] == "hf://datasets/HuggingFaceH4/aime_2024/data/train-*.parquet"
    assert sources["train0"]["eval_size"] == 64
    assert sources["train1"]["fields"] == {"prompt": "prompt.0.content", "answer": "reward_model.ground_truth"}
    assert conversion.tree()["eval"] == {"samples": 16}
    assert not conversion.problems
    assert "set them to the shares of rows" in report_of(conversion)


def test_held_out_rows_with_other_fields_are_reported(tmp_path: Path) -> None:
    conversion = convert(
        tmp_path,
        "grpo: {max_num_steps: 5}\ndata: {train: {dataset_name: DAPOMath17K}, validation: {dataset_name: AIME2024}}\n",
    )
    assert "data/train-*.parquet has prompt 'problem', answer 'answer'" in report_of(conversion)


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ("Answer in \\boxed{{}}.\n{}\n", "Answer in \\boxed{}.\n{prompt}\n"),
        ("No place.", None),
        ("{} and {}", None),
        ("{name}: {}", None),
    ],
)
def test_prompt_files_become_templates(tmp_path: Path, content: str, template: str | None) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts/p.txt").write_text(content)
    (tmp_path / "prompts/s.txt").write_text("Be brief.")
    conversion = convert(
        tmp_path,
        "grpo: {max_num_steps: 5}\n"
        "data:\n"
        "  train: {dataset_name: DeepScaler}\n"
        "  default: {prompt_file: prompts/p.txt, system_prompt_file: prompts/s.txt}\n",
    )
    data = data_of(conversion)
    assert data.get("prompt_template") == template
    assert data["system_prompt"] == "Be brief."
    assert ("no single place {} for the prompt" in report_of(conversion)) == (template is None)


def test_a_prompt_file_that_is_not_found_is_reported(tmp_path: Path) -> None:
    conversion = convert(tmp_path, "grpo: {max_num_steps: 5}\ndata: {train: {dataset_name: DeepScaler}}\n")
    assert "copy the text of examples/prompts/cot.txt to data.prompt_template, with {prompt}" in report_of(conversion)


def test_a_prompt_file_and_a_context_make_one_template(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Q: {}\nA:")
    conversion = convert(
        tmp_path,
        "sft: {max_num_steps: 5}\n"
        "data: {train: {dataset_name: squad}, default: {prompt_file: p.txt}, validation: null}\n",
    )
    assert data_of(conversion)["prompt_template"] == "{context}\n\nQ: {question}\nA:"


def test_settings_without_a_value_in_megarl_are_accepted(tmp_path: Path) -> None:
    conversion = convert(
        tmp_path,
        "dpo: {max_num_steps: 5, val_period: -1}\n"
        "policy: {max_grad_norm: null}\n"
        "data: {train: {dataset_name: Tulu3Preference}, validation: null}\n",
    )
    assert not conversion.problems
    assert conversion.tree()["trainer"]["optimizer"]["clip_grad"] == 0.0  # type: ignore[index]


def test_relative_interpolations_of_null_are_null(tmp_path: Path) -> None:
    conversion = convert(
        tmp_path,
        "grpo: {max_num_steps: 5}\npolicy: {generation: {top_k: null, val_top_k: '${.top_k}'}}\n",
    )
    assert not conversion.unknown
