"""Which checkpoint a run goes on from, and whether it may: `megarl train|sft|rm|dpo CONFIG --resume auto|STEP|PATH`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.config_diff import differences, require_no_contradictions
from megarl.checkpoint.manifest import Contents, Manifest, read_manifest, require_same_model
from megarl.checkpoint.store import CheckpointStore, Saved, shortened
from megarl.checkpoint.verify import damage_told, hash_file
from megarl.config import RunConfig, StageConfig, command_of, load_resolved
from megarl.errors import ConfigError, DataError
from megarl.rollout.journal.journal import fingerprint_of
from megarl.rollout.journal.journal_folder import fingerprints_in, steps_in

AUTO = "auto"

JOURNAL = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a run begins."""

    checkpoint: Path | None = None
    """What it goes on from; None: the model's folder."""
    stale: tuple[Path, ...] = ()
    """What it must not find in its folder, to be set aside."""


def find_start(config: StageConfig, which: str, results: tuple[str, ...], say: Callable[[str], None]) -> Start:
    """Where the run goes on; nothing has been changed yet.

    Args:
        config: with absolute paths.
        which: `auto`: the newest whole checkpoint, or, where a run has come to none, its beginning; a step; or the
            folder of a checkpoint, of any run.
        results: what a run writes into its folder.

    Raises:
        DataError: there is no such checkpoint, it is damaged, as all are with `auto`, or it is of another model or of
            other data.
        ConfigError: the run that it is of was started by another command, or had other settings that count, or it is of
            a step behind the last.
    """
    run_dir, store = Path(config.run_dir), CheckpointStore(config.run_dir)
    saved = newest_whole(config, say) if which == AUTO else store.find(which, say)
    if saved is None:
        say(f"{store.folder} has no checkpoint to go on from: the run begins anew")
        stale = [run_dir / name for name in results if name != JOURNAL]
        return Start(stale=(*stale, *_other_journal(config, 0, say)))
    if which != AUTO and reads_all(config) and (found := damage_told(saved.folder, say)):
        raise DataError(f"checkpoint {saved.folder} is damaged: {shortened(found)}")
    _require_same_run(config, saved, say)
    if config.trainer.steps < saved.step:
        raise ConfigError(
            f"trainer.steps needs to be at least {saved.step}, of which {saved.name} is, got {config.trainer.steps}"
        )
    if saved.folder.resolve().parent != store.folder.resolve():
        return Start(checkpoint=saved.folder, stale=tuple(run_dir / name for name in results))
    later = [each.folder for each in store.saved() if each.step > saved.step] if which != AUTO else []
    return Start(checkpoint=saved.folder, stale=(*later, *_other_journal(config, saved.step, say)))


def newest_whole(config: StageConfig, say: Callable[[str], None]) -> Saved | None:
    """The run's newest checkpoint that can be loaded; damaged ones are told. None: there is none, damaged or not.

    Raises:
        DataError: all are damaged.
    """
    store = CheckpointStore(config.run_dir)
    newest = store.newest_whole(say, deep=reads_all(config))
    if newest is None and (damaged := store.saved()):
        raise DataError(
            f"{store.folder} has no checkpoint that is whole, of {len(damaged)}: mend one, resume from that of another "
            "run, or begin anew without --resume, which sets them aside"
        )
    return newest


def reads_all(config: StageConfig) -> bool:
    """Whether every byte of a checkpoint is read before it is loaded."""
    return config.checkpoint.verify == "checksums"


def _other_journal(config: StageConfig, step: int, say: Callable[[str], None]) -> list[Path]:
    """The journal, where it holds rollouts that the run would not make which goes on from `step`.

    They are of another configuration; or a step before theirs is missing, which may come out otherwise this time.
    """
    folder = Path(config.run_dir) / JOURNAL
    own = {fingerprint_of(config)} if isinstance(config, RunConfig) else set()
    if fingerprints_in(config.run_dir) - own:
        say(f"{folder} is of other settings, and is set aside")
        return [folder]
    later = [each for each in steps_in(config.run_dir) if each > step]
    missing = next((each for each in range(step + 1, max(later, default=0)) if each not in later), None)
    if missing is not None:
        say(f"{folder} has step {max(later)} and not step {missing}, and is set aside")
        return [folder]
    return []


def _require_same_data(manifest: Manifest, path: Path, name: str) -> None:
    """Return if the sampler would go on in the rows that it stands in: prompts would be lost and repeated."""
    if manifest.data is None:
        return
    try:
        size = path.stat().st_size
        same = size == manifest.data.bytes and hash_file(path) == manifest.data
    except OSError as e:
        raise DataError(f"data.path {path} cannot be read: {e.strerror}") from e
    if not same:
        what = "others" if size == manifest.data.bytes else str(size)
        raise DataError(
            f"data.path {path} holds other rows than those that checkpoint {name} stands in: needs its "
            f"{manifest.data.bytes} bytes, got {what}"
        )


def _require_same_run(config: StageConfig, saved: Saved, say: Callable[[str], None]) -> None:
    before = load_resolved(saved.folder / "config.yaml")
    if type(before) is not type(config):
        raise ConfigError(
            f"--resume: checkpoint {saved.folder} is of a run of megarl {command_of(before)}, and megarl "
            f"{command_of(config)} cannot go on from it; a model that it has exported can be model.path"
        )
    manifest = read_manifest(saved.folder)
    require_same_model(manifest.model, Contents.of(config).model, saved.name)
    _require_same_data(manifest, Path(config.data.path), saved.name)
    found = differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
    require_no_contradictions(found, saved.name)
    for each in found:
        say(f"{each.path} was {each.saved!r} in {saved.name}, is {each.now!r}")
