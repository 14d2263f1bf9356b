"""Seeds faults into a copy of the tree, one at a time, and runs the tests that must fail for each: `make mutants`.

A fault is a replacement of code that stands once in its file. It is caught if some of the named tests fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.maintenance.tree_measures import ROOT, tracked_files


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, and where it must be found."""

    file: str
    old: str
    new: str
    tests: str
    """Files or folders of tests, separated by spaces."""


MUTANTS = (
    # pure functions of tensors
    Mutant(
        "megarl/functional/advantages.py",
        "centred_N**2) / (count_G - 1)",
        "centred_N**2) / count_G",
        "tests/functional",
    ),
    Mutant(
        "megarl/functional/advantages.py",
        "delta_CR.add_(tokens.next_values(values_CR).mul_(gamma)).sub_(values_CR)",
        "delta_CR.add_(tokens.next_values(values_CR)).sub_(values_CR)",
        "tests/functional",
    ),
    Mutant(
        "megarl/functional/losses.py",
        "ratio_T.clamp(1 - clip_low, 1 + clip_high)\n    loss_T",
        "ratio_T.clamp(1 - clip_high, 1 + clip_low)\n    loss_T",
        "tests/functional",
    ),
    Mutant("megarl/functional/losses.py", "torch.expm1(-log_ratio_T)", "torch.expm1(log_ratio_T)", "tests/functional"),
    # packing and balance
    Mutant(
        "megarl/batch/pack.py",
        "_concatenate_padded([t.loss_mask for t in trajectories], lengths, np.bool_).roll(-1)",
        "_concatenate_padded([t.loss_mask for t in trajectories], lengths, np.bool_)",
        "tests/batch",
    ),
    Mutant(
        "megarl/batch/pack.py",
        "num_tokens + -num_tokens % (2 * cp)",
        "num_tokens + -num_tokens % cp",
        "tests/batch tests/megatron/test_request_samples.py",
    ),
    Mutant(
        "megarl/batch/balance.py",
        "growing * (growing + 1) // 2",
        "growing * growing",
        "tests/batch",
    ),
    # schedules
    Mutant(
        "megarl/run/schedule/schedule.py",
        "if num_due > max(0, deadline - step) * self._groups_per_step:",
        "if num_due > max(0, deadline - step + 1) * self._groups_per_step:",
        "tests/run/schedule",
    ),
    Mutant(
        "megarl/run/schedule/schedule.py",
        "insort(bucket.finished, ordinal)",
        "bucket.finished.append(ordinal)",
        "tests/run/schedule",
    ),
    # planning and moving weights
    Mutant(
        "megarl/reshard/layout/layout.py",
        "all(start < stop for start, stop in box)",
        "all(start <= stop for start, stop in box)",
        "tests/reshard/layout tests/reshard/planning",
    ),
    Mutant(
        "megarl/reshard/transfer/commit_decision.py",
        "while self._add_nothing(_RECEIVED) < self._spec.size:",
        "while self._add_nothing(_RECEIVED) < self._spec.size - 1:",
        "tests/reshard/transfer tests/run/remote tests/engines/sglang/weight_update/test_update_session.py",
    ),
    Mutant("megarl/reshard/planning/rounds.py", "ALIGNMENT = 16", "ALIGNMENT = 2", "tests/reshard"),
    Mutant(
        "megarl/reshard/planning/rounds.py",
        "return copied + sum(receive.num_bytes for hop in self.hops for receive in hop.receives)",
        "return copied + sum(receive.num_bytes for hop in self.hops[:1] for receive in hop.receives)",
        "tests/reshard",
    ),
    # trainer ranks
    Mutant(
        "megarl/losses.py",
        "values_S.sum() / (self.denominators.num_sequences * self.cp_size)",
        "values_S.sum() / self.denominators.num_sequences",
        "tests/megatron/training/test_loss.py",
    ),
    Mutant(
        "megarl/megatron/request_samples.py",
        "lengths_U = padded_N.reshape(-1, sequences_per_unit).sum(axis=1)",
        "lengths_U = padded_N.reshape(-1, sequences_per_unit).max(axis=1)",
        "tests/megatron/test_request_samples.py",
    ),
    # rollouts
    Mutant(
        "megarl/engines/engine.py",
        "sampling=replace(request.sampling, max_new_tokens=left)",
        "sampling=request.sampling",
        "tests/rollout/test_rollout_worker.py tests/engines/sglang/test_sglang_engine.py",
    ),
    Mutant(
        "megarl/engines/engine.py",
        "policy_versions=np.concatenate([part.policy_versions, rest.policy_versions])",
        "policy_versions=np.concatenate([part.policy_versions, rest.policy_versions])[::-1]",
        "tests/rollout/test_rollout_worker.py tests/engines/sglang/test_sglang_engine.py",
    ),
    Mutant(
        "megarl/rollout/journal.py",
        "entry = None if key in entries else _read_entry(location)",
        "entry = _read_entry(location)",
        "tests/rollout/test_journal.py",
    ),
    Mutant(
        "megarl/rollout/journal.py",
        "        job.sampling,\n        job.seed,\n",
        "        job.sampling,\n",
        "tests/rollout/test_journal.py",
    ),
    # rewards
    Mutant("megarl/reward/terms.py", "float(finished and text.endswith", "float(text.endswith", "tests/reward"),
    Mutant(
        "megarl/reward/math_equivalence.py",
        "if boxed > marked:",
        "if boxed >= 0:",
        "tests/reward",
    ),
    # data
    Mutant(
        "megarl/data/sampler.py",
        "SeedSequence([self.seed, epoch, *source])",
        "SeedSequence([self.seed, *source])",
        "tests/data",
    ),
    Mutant(
        "megarl/data/sampler.py",
        "before = period * self._weights[source] + int(self._ranks[position])",
        "before = period + int(self._ranks[position])",
        "tests/data",
    ),
    # checkpoints
    Mutant(
        "megarl/checkpoint/manifest.py",
        "if found.sha256 == record.sha256:",
        "if found.bytes == record.bytes:",
        "tests/checkpoint",
    ),
    Mutant(
        "megarl/checkpoint/store.py",
        "steps = sorted(candidates)",
        "steps = list(candidates)",
        "tests/checkpoint tests/run",
    ),
    # the run
    Mutant(
        "megarl/run/step_limits.py", "if self.skips_in_a_row > most:", "if self.skips_in_a_row >= most:", "tests/run"
    ),
    Mutant(
        "megarl/run/group_sampler.py",
        "                self.solved.in_a_row.pop(name, None)",
        "                pass",
        "tests/run tests/algorithms",
    ),
    # supervision
    Mutant(
        "megarl/run/supervision/restart_budget.py",
        "            self._failures.clear()\n",
        "",
        "tests/run/supervision",
    ),
    Mutant(
        "megarl/run/supervision/restart_budget.py",
        "2.0 ** min(recent - 1, 60)",
        "2.0 ** min(recent, 60)",
        "tests/run/supervision",
    ),
    # workers
    Mutant(
        "megarl/cluster/workers/dispatch.py",
        "return results[grid.output_rank(0)]",
        "return results[0]",
        "tests/cluster/workers tests/megatron/test_request_samples.py",
    ),
)
"""Thirty faults in twelve packages."""


def copy_tree(to: Path) -> None:
    """Copy all tracked files; their links stay links."""
    for name in tracked_files():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def is_caught(mutant: Mutant, tree: Path) -> bool:
    """Return whether tests fail with the fault in the tree, which is as before afterwards."""
    file = tree / mutant.file
    source = file.read_text()
    if source.count(mutant.old) != 1:
        sys.exit(f"{mutant.file} has {source.count(mutant.old)} places of {mutant.old!r}, needs one")
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return run_tests(mutant.tests.split(), tree) == pytest.ExitCode.TESTS_FAILED
    finally:
        file.write_text(source)


def run_tests(tests: Sequence[str], tree: Path) -> int:
    """Return pytest's exit status; the tests, and the processes that they start, import the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print("   ", failed[0] if failed else f"no test failed: exit status {done.returncode}", flush=True)
    return done.returncode


def main() -> int:
    """Return 0 if all faults are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="seed only faults in files that contain TEXT")
    only = parser.parse_args().only
    mutants = [mutant for mutant in MUTANTS if only in mutant.file]
    missed = []
    with tempfile.TemporaryDirectory(prefix="megarl-mutants-") as folder:
        copy_tree(Path(folder))
        for number, mutant in enumerate(mutants, 1):
            print(f"[{number}/{len(mutants)}] {mutant.file}: {mutant.new.strip() or 'removed'}", flush=True)
            if not is_caught(mutant, Path(folder)):
                missed.append(mutant)
    print(f"{len(mutants) - len(missed)} of {len(mutants)} faults are caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
