"""Rows that terms of type `code` can grade, and the others, which a run leaves out if its configuration says so."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from megarl.config.data import Source
from megarl.config.reward_code import CodeRewardConfig
from megarl.config.run import RunConfig
from megarl.data.rows import Row
from megarl.reward.code.assertions import TestCaseError
from megarl.reward.code.test_cases import ReferenceSandbox, load_tests

logger = logging.getLogger(__name__)


class GradableRows:
    """Drops the rows that a term with `ungradable_rows: drop` cannot grade, and counts them."""

    def __init__(self, config: RunConfig) -> None:
        """Create the filter; starts no sandbox."""
        self._terms = {
            name: (term, ReferenceSandbox(term.sandbox, key=f"reward.terms.{name}.sandbox"))
            for name, term in config.reward.terms.items()
            if isinstance(term, CodeRewardConfig) and term.ungradable_rows == "drop"
        }
        self._dropped = Counter[str]()

    def of_source(self, source: Source) -> Callable[[Row], bool] | None:
        """Return the function that tells whether a row of a source is kept; None: all are."""
        names = source.config.reward_terms
        terms = [each for name, each in self._terms.items() if names is None or name in names]

        def is_kept(row: Row) -> bool:
            try:
                for term, references in terms:
                    load_tests(row.fields, term, references.run)
            except TestCaseError as e:
                self._dropped[str(row.path)] += 1
                logger.info("%s: dropped, since it cannot be graded: %s", row.where, e)
                return False
            return True

        return is_kept if terms else None

    def close(self) -> None:
        """Log how many rows were dropped, and release the sandboxes."""
        for path, num_dropped in self._dropped.items():
            logger.warning("%s: dropped %d rows that cannot be graded (megarl check names them)", path, num_dropped)
        for _, references in self._terms.values():
            references.close()
