"""Health of a peer's process, from its status file: no port has to be open for it, and no key is read.

The status file is written by a thread of its own, so it also has the age of the network thread's last sign of life.
"""

from pathlib import Path
from typing import NamedTuple

from pdsl.peer.status import read_status
from pdsl.utils.errors import PdslError

MAX_NETWORK_PAUSE = 30.0  # seconds without a sign of life of the network thread


class Health(NamedTuple):
    """State of a process in one line."""

    healthy: bool
    text: str


def check_health(folder: Path) -> Health:
    """Check the process of a folder; PdslError if there is no such folder."""
    if not folder.is_dir():
        raise PdslError(f"no folder {folder}; give the folder of a peer")
    try:
        status = read_status(folder)
    except PdslError as e:
        return Health(False, str(e))
    if status is None:
        return Health(False, f"{folder} has not run yet; start it with: pdsl peer run {folder}")
    at = f"{status.name}: round {status.round} of {status.rounds}"
    if not status.running:
        return Health(status.completed, f"{at}, {'all rounds completed' if status.completed else 'not running'}")
    if status.network_pause > MAX_NETWORK_PAUSE:
        return Health(False, f"{at}, but its network thread has hung for {status.network_pause:.0f} s; restart it")
    present = sum(n.in_round for n in status.neighbours)
    return Health(True, f"{at}, {status.doing}, {present} of {len(status.neighbours)} neighbours in the round")
