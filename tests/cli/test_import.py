"""`megarl import`: the configuration it prints, its options and exit codes; `megarl check --offline`."""

import json
from pathlib import Path

import pytest
import yaml

SCRIPTS = Path(__file__).parents[1] / "importing/verl"


def test_what_import_prints_is_accepted_by_check_offline(run, tmp_path):
    file = tmp_path / "run.yaml"
    code, out, err = run("import", "verl", SCRIPTS / "dapo_fsdp2.sh", "--out", file)
    assert (code, out, err) == (0, "", f"wrote {file}\n")
    assert yaml.safe_load(file.read_text())["algorithm"]["overlong"]["buffer"] == 4096
    code, out, err = run("check", "--offline", file)
    assert (code, err) == (0, "")
    skipped, ok = out.splitlines()[-2:]
    assert skipped.startswith("# skipped, because they need the model, the data, modules of yours or the machine: ")
    assert {"data", "config.json", "packages"} <= {*skipped.partition("machine: ")[2].split(", ")}
    assert ok == "# ok: no problems found offline for megarl train"


def test_the_account_is_on_top_and_each_key_has_its_origin(output):
    text = output("import", "verl", SCRIPTS / "rloo.sh")
    assert "# To fill in, because only a run of the script would give the values:" in text
    assert "data.train_files=$DATA_DIR/train.parquet (rloo.sh:5)" in " ".join(text.replace("\n# ", " ").split())
    assert "  temperature: 0.9  # actor_rollout_ref.rollout.temperature" in text


def test_json_has_the_configuration_and_the_account(output):
    record = json.loads(output("import", "verl", SCRIPTS / "rloo.sh", "--env", "DATA_DIR=/d", "--json"))
    assert record["config"]["data"]["path"] == "/d/train.parquet"
    assert record["sources"]["rollout.sampling.temperature"] == ["actor_rollout_ref.rollout.temperature"]
    assert {setting["key"] for setting in record["unmapped"]} == {
        "actor_rollout_ref.rollout.top_p",
        "trainer.logger",
        "actor_rollout_ref.actor.use_dynamic_bsz",
    }
    assert record["unknown"] == record["problems"] == []


def test_a_configuration_that_check_would_refuse_is_printed_with_its_problems(run, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=2 \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.n=2\n"
    )
    code, out, err = run("import", "verl", script)
    assert code == 2
    assert "# Problems that megarl check --offline finds:" in out
    assert "2 * 2 / 1 = 4 < dp" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.sh"], "none.sh: cannot read the file: No such file or directory"),
        ([SCRIPTS / "rloo.sh", "--env", "X"], "--env X: needs the form NAME=VALUE"),
        ([SCRIPTS / "rloo.sh", "--out", "/none/such/run.yaml"], "/none/such/run.yaml: cannot write the file: No such"),
        ([SCRIPTS / "lora.sh"], "lora.sh:4: actor_rollout_ref.model.lora_rank=32 is refused"),
    ],
)
def test_refusals(refusal, words, message):
    assert message in refusal("import", "verl", *words)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.stpes=3"], "trainer.stpes: unknown key"),
        (["trainer.steps=many"], "trainer.steps: Input should be a valid integer"),
        (["algorithm.num_mini_batches=5"], "num_mini_batches needs to divide prompts_per_step"),
        (["trainer.profile.steps=[1]", "trainer.profile.ranks=[999]"], "trainer.profile.ranks: the trainer has ranks"),
        (["rollout.replicas=999"], "rollout needs tp * replicas <= slots"),
    ],
)
def test_check_offline_refuses_keys_types_and_contradictions(run, refusal, tmp_path, overrides, message):
    file = tmp_path / "run.yaml"
    assert run("import", "verl", SCRIPTS / "gspo_moe_megatron.sh", "--out", file)[0] == 0
    assert message in refusal("check", "--offline", file, "--set", *overrides)


def test_check_offline_imports_nothing_of_the_user(output, tmp_path):
    file = tmp_path / "run.yaml"
    output("import", "verl", SCRIPTS / "reinforce_pp_cosine.sh", "--out", file)
    assert "# imported" not in output("check", "--offline", file)


def test_check_offline_does_not_take_a_gpu(refusal, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: x\nmodel: {path: x}\ndata: {path: x}\n")
    assert "--gpu: needs the model" in refusal("check", "--offline", file, "--gpu", "h100-80")
