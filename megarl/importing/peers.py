"""The trainers that `megarl import` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import DataError
from megarl.importing.conversion import Conversion, convert
from megarl.importing.nemo_rl.key_tables import NEMO_RL
from megarl.importing.nemo_rl.yaml_settings import read_run as read_nemo_rl
from megarl.importing.nemo_rl.yaml_settings import table_of as nemo_rl_table_of
from megarl.importing.peer_settings import Setting
from megarl.importing.slime.argument_table import SLIME
from megarl.importing.slime.argument_table import table_of as slime_table_of
from megarl.importing.slime.launch_arguments import read_run as read_slime
from megarl.importing.tables import PeerTable
from megarl.importing.verl.run_settings import read_run as read_verl
from megarl.importing.verl.table import VERL

type Reader = Callable[[str, Path, Mapping[str, str]], tuple[Mapping[str, Setting], Sequence[str]]]
"""(text of a file, its path, environment variables) -> the settings it gives by key, and notes on the reading.

Raises ConfigError or DataError with file and line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A trainer whose runs can be converted."""

    table: PeerTable
    """All keys, as the documentation lists them."""
    read: Reader
    table_of: Callable[[Mapping[str, Setting]], PeerTable] | None = None
    """Returns the table of a run, where it depends on the settings; None: `table`."""


PEERS: Mapping[str, Peer] = {
    "verl": Peer(table=VERL, read=read_verl),
    "slime": Peer(table=SLIME, read=read_slime, table_of=slime_table_of),
    "nemo-rl": Peer(table=NEMO_RL, read=read_nemo_rl, table_of=nemo_rl_table_of),
}


def import_run(peer: str, path: Path, variables: Mapping[str, str]) -> Conversion:
    """Convert the run script or configuration file at `path`; nothing is executed.

    Args:
        variables: values of environment variables that the script refers to.

    Raises:
        DataError: the file cannot be read.
        ConfigError: a value has the wrong type, or has no equivalent without which megarl would train something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise DataError(f"{path}: cannot read the file: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: not valid UTF-8 at byte {e.start}") from e
    found = PEERS[peer]
    given, notes = found.read(text, path, variables)
    return convert(found.table if found.table_of is None else found.table_of(given), given, notes)
