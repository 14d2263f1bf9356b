"""Choose and validate the checkpoint of `megarl train|sft|rm|dpo CONFIG --resume auto|STEP|PATH`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from megarl.checkpoint.manifest import (
    CheckpointMetadata,
    Manifest,
    hash_files,
    read_manifest,
    require_same_model,
    verify_and_report,
)
from megarl.checkpoint.store import CheckpointEntry, CheckpointStore, summarize_problems
from megarl.config import RunConfig, StageConfig, command_of, load_resolved
from megarl.data.data_files import find_data_files
from megarl.errors import ConfigError, DataError
from megarl.rollout.journal import journal_fingerprint, list_steps, read_fingerprints
from megarl.run.run_logs import continues_log, log_folder
from megarl.run.run_state import RunState
from megarl.run.schedule.events import ScheduleState

ALLOWED = (
    "algorithm.*.parallel",
    "checkpoint",
    "data.path",
    "data.sources.*.path",
    "dpo.reference.parallel",
    "export_dir",
    "limits",
    "model.hub_revisions",
    "model.path",
    "placement",
    "recovery",
    "reward.max_failed_share",
    "reward.terms.*.api_key_env",
    "reward.terms.*.max_batch_size",
    "reward.terms.*.max_concurrent",
    "reward.terms.*.max_concurrent_requests",
    "reward.terms.*.max_retries",
    "reward.terms.*.parallel",
    "reward.terms.*.timeout_seconds",
    "reward.terms.*.url",
    "rollout.engine",
    "rollout.no_progress_seconds",
    "rollout.replicas",
    "rollout.request_timeout_seconds",
    "rollout.tp",
    "rollout.workers",
    "run_dir",
    "schedule.late",
    "schedule.lookahead",
    "schedule.max_staleness",
    "schedule.update",
    "tracking",
    "trainer.eval_every",
    "trainer.fused_lm_head",
    "trainer.max_tokens_per_micro_batch",
    "trainer.megatron.ddp",
    "trainer.offload",
    "trainer.parallel",
    "trainer.profile",
    "trainer.recompute",
    "trainer.steps",
    "trainer.timeout_seconds",
    "weight_sync",
)
"""Keys, with everything below them, that may change on resume: they set where and how a run computes, not what.

Paths may change because files may have moved; that model and data are the same is checked separately.
"""


class _Absent:
    """Type of `ABSENT`, which stands for the value of a missing key."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """A configuration key whose saved and current values differ."""

    path: str
    """Dotted path as in YAML: `trainer.optimizer.lr`."""
    saved: Any
    """`ABSENT` if the key is missing."""
    current: Any
    """`ABSENT` if the key is missing."""
    allowed: bool
    """Whether the key may change on resume."""

    def __str__(self) -> str:
        verdict = "allowed" if self.allowed else "contradicts"
        saved, current = (repr(each) if each is ABSENT else json.dumps(each) for each in (self.saved, self.current))
        return f"{self.path}: {saved} was saved, got {current} ({verdict})"


def diff_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return every key whose value differs, sorted by path.

    Args:
        saved: configuration of the checkpoint, from `model_dump(mode="json")`.
        current: configuration of the run that resumes from it, in the same form.
    """
    lr_decays = _uses_lr_decay(saved) or _uses_lr_decay(current)
    return [
        ConfigDifference(path=path, saved=before, current=after, allowed=_is_allowed(path, lr_decays=lr_decays))
        for path, before, after in sorted(_unequal_keys(saved, current, ""), key=lambda each: each[0])
    ]


def require_no_contradictions(found: Sequence[ConfigDifference], checkpoint_name: str) -> None:
    """Return if all differences are allowed.

    Raises:
        ConfigError: one is not. The message lists all differences, one per line, those not allowed first.
    """
    if all(each.allowed for each in found):
        return
    lines = "\n".join(f"  {each}" for each in sorted(found, key=lambda each: each.allowed))
    raise ConfigError(
        f"the configuration contradicts that of checkpoint {checkpoint_name}:\n{lines}\n"
        "restore the saved values of the keys marked `contradicts`, or start a new run in another run_dir"
    )


def _unequal_keys(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for key in {**saved, **current}:
        before, after = saved.get(key, ABSENT), current.get(key, ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _unequal_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def _is_allowed(path: str, *, lr_decays: bool) -> bool:
    if path == "trainer.steps":
        return not lr_decays
    parts = path.split(".")
    return any(
        len(parts) >= len(keys) and all(map(fnmatchcase, parts, keys)) for keys in (each.split(".") for each in ALLOWED)
    )


def _uses_lr_decay(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate of any trained model depends on the total number of steps."""
    algorithm = config.get("algorithm", {})
    trained = [config.get("trainer", {}), *(each for each in algorithm.values() if isinstance(each, Mapping))]
    return any(each.get("optimizer", {}).get("decay", "constant") != "constant" for each in trained)


AUTO = "auto"

JOURNAL = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What a run resumes from and which paths of its folder to rename first."""

    checkpoint: Path | None = None
    """Checkpoint folder to resume from; None: start from step 0 with the weights in `model.path`."""
    to_rotate: tuple[Path, ...] = ()
    """Paths in the run folder that are incompatible with the resumed run and are renamed before it starts."""


def plan_resume(
    config: StageConfig, which: str, artifacts: tuple[str, ...], notify: Callable[[str], None]
) -> ResumePlan:
    """Choose and validate the checkpoint to resume from. Changes nothing on disk.

    Args:
        config: configuration with absolute paths.
        which: `auto`: the newest valid checkpoint, or step 0 if the run has none; a step number; or the folder of a
            checkpoint, also of another run.
        artifacts: names of the files and folders that a run writes into its folder.
        notify: receives one line of text for each notable finding.

    Raises:
        DataError: the checkpoint does not exist, is damaged (with `auto`: all are), has another format, or belongs to
            another model or to other data. Or the run's rollout journal has another format.
        ConfigError: the checkpoint was written by another command or with incompatible settings, or its step is beyond
            `trainer.steps`.
    """
    run_dir, store = Path(config.run_dir), CheckpointStore(config.run_dir)
    saved = latest_valid(config, notify) if which == AUTO else store.find(which, notify)
    if saved is None:
        notify(f"{store.folder} has no checkpoint to resume from: the run starts from step 0")
        to_rotate = [run_dir / name for name in artifacts if name != JOURNAL]
        return ResumePlan(to_rotate=(*to_rotate, *_incompatible_journal(config, 0, notify)))
    if which != AUTO and verifies_checksums(config) and (found := verify_and_report(saved.folder, notify)):
        raise DataError(f"checkpoint {saved.folder} is damaged: {summarize_problems(found)}")
    _require_same_run(config, saved, notify)
    if config.trainer.steps < saved.step:
        raise ConfigError(
            f"trainer.steps needs to be at least {saved.step}, the step of {saved.name}, got {config.trainer.steps}"
        )
    if saved.folder.resolve().parent != store.folder.resolve():
        return ResumePlan(checkpoint=saved.folder, to_rotate=tuple(run_dir / name for name in artifacts))
    later = [each.folder for each in store.entries() if each.step > saved.step] if which != AUTO else []
    incompatible = _incompatible_journal(config, saved.step, notify, checkpoint=saved.folder)
    return ResumePlan(checkpoint=saved.folder, to_rotate=(*later, *incompatible))


def latest_valid(config: StageConfig, notify: Callable[[str], None]) -> CheckpointEntry | None:
    """Return the run's newest checkpoint that can be loaded; None if the run has no checkpoints.

    Damaged ones are reported to `notify`.

    Raises:
        DataError: the run has checkpoints and all are damaged.
    """
    store = CheckpointStore(config.run_dir)
    newest = store.latest_valid(notify, deep=verifies_checksums(config))
    if newest is None and (damaged := store.entries()):
        raise DataError(
            f"{store.folder} has no valid checkpoint, all {len(damaged)} are damaged: repair one, resume from a "
            "checkpoint of another run, or start a new run without --resume, which renames this folder"
        )
    return newest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedInputs:
    """Inputs that a run fixes when it begins, unless its configuration states them."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Commit hash of each model that was downloaded, by hub id."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Commit hash of each dataset that was downloaded, by its name in paths."""
    template_date: date | None = None
    """Date that chat templates write into prompts; None: not recorded."""


def recorded_inputs(config: StageConfig, which: str) -> RecordedInputs:
    """Return what the run to resume has recorded; empty if it has recorded nothing.

    Args:
        which: as in `plan_resume`. The run folder's own record serves for `auto`, steps and names.

    Raises:
        ConfigError: the record cannot be read.
    """
    for file in (Path(which) / "config.yaml", Path(config.run_dir) / f"{command_of(config)}.yaml"):
        if file.is_file():
            saved = load_resolved(file)
            return RecordedInputs(
                models=saved.model.hub_revisions, data=saved.data.hub_revisions, template_date=saved.data.template_date
            )
    return RecordedInputs()


def verifies_checksums(config: StageConfig) -> bool:
    """Whether checkpoints are verified by checksums, which reads every byte, before they are loaded."""
    return config.checkpoint.verify == "checksums"


def _incompatible_journal(
    config: StageConfig, step: int, notify: Callable[[str], None], *, checkpoint: Path | None = None
) -> list[Path]:
    """Journal paths to rotate: they hold rollouts that a run resumed at `step` would not reproduce.

    Either the journal was written with another configuration, or a step between `step` and its last one is missing, or
    events of the schedule after the checkpoint: the weights after the missing step may differ this time.
    """
    folder = Path(config.run_dir) / JOURNAL
    expected = {journal_fingerprint(config)} if isinstance(config, RunConfig) else set()
    if read_fingerprints(config.run_dir) - expected:
        notify(f"{folder} was written with other settings and is renamed")
        return [folder]
    if isinstance(config, RunConfig) and config.schedule.type != "sync":
        state = (RunState.read(checkpoint).schedule if checkpoint is not None else None) or ScheduleState()
        if not continues_log(config, state):
            notify(f"{log_folder(folder)} lacks the events after step {step}; {folder} is renamed")
            return [folder]
        return []
    later = [each for each in list_steps(config.run_dir) if each > step]
    missing = next((each for each in range(step + 1, max(later, default=0)) if each not in later), None)
    if missing is not None:
        notify(f"{folder} has step {max(later)} but not step {missing} and is renamed")
        return [folder]
    return []


def _require_same_data(manifest: Manifest, files: Mapping[str, str], name: str) -> None:
    """Return if the data files are those the sampler position refers to; else prompts would be skipped or repeated."""
    for key, saved in manifest.data.items():
        if key not in files:
            continue  # the comparison of the configurations reports it
        path = files[key]
        try:
            found = find_data_files(path)
            size = sum(file.stat().st_size for file in found)
            same = size == saved.bytes and hash_files(found) == saved
        except OSError as e:
            raise DataError(f"{key} {path} cannot be read: {e.strerror}") from e
        if not same:
            what = "others" if size == saved.bytes else str(size)
            raise DataError(
                f"{key} {path} holds other rows than the data file of checkpoint {name}: needs its {saved.bytes} "
                f"bytes, got {what}"
            )


def _require_same_run(config: StageConfig, saved: CheckpointEntry, notify: Callable[[str], None]) -> None:
    before = load_resolved(saved.folder / "config.yaml")
    if type(before) is not type(config):
        raise ConfigError(
            f"--resume: checkpoint {saved.folder} was written by megarl {command_of(before)}, and megarl "
            f"{command_of(config)} cannot resume from it; to start from its weights, set model.path to its exported "
            "model"
        )
    manifest = read_manifest(saved.folder)
    require_same_model(manifest.model, CheckpointMetadata.from_config(config).model, saved.name)
    _require_same_data(manifest, config.data.training_files, saved.name)
    found = diff_configs(before.model_dump(mode="json"), config.model_dump(mode="json"))
    require_no_contradictions(found, saved.name)
    for each in found:
        notify(f"{each.path} was {each.saved!r} in {saved.name}, is {each.current!r}")
