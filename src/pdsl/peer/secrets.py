"""An organisation's secret key for noise and batches, and the log that goes with it: its incarnation.

Key and log are only good together. With the key alone, nobody knows what its noise was used on already; so if one of
them is lost, both are made anew under the next number, and what is sent from then on is charged besides.
"""

import secrets as system
from pathlib import Path
from typing import NamedTuple

from pdsl.errors import PdslError
from pdsl.files import PRIVATE, write_whole
from pdsl.peer.account import Account
from pdsl.peer.events import Events
from pdsl.peer.files import read_private
from pdsl.peer.sent import DamagedError, SentLog
from pdsl.randomness import KEY_BYTES


class Incarnation(NamedTuple):
    number: int
    key: bytes
    log: SentLog


def key_file(run: Path, number: int) -> Path:
    return run / f"secret-{number}.key"


def log_file(run: Path, number: int) -> Path:
    return run / f"sent-{number}.log"


def incarnate(run: Path, account: Account, events: Events) -> Incarnation:
    """The incarnation to go on with: the last one, or a new one if its key or log is lost."""
    numbers = [int(file.stem.partition("-")[2]) for file in run.glob("secret-*.key") if file.stem[7:].isdecimal()]
    number = max([account.incarnation, *numbers])
    try:
        return _taken_up(run, number, account)
    except DamagedError as e:
        if account.charges:
            events.log("new incarnation", number=number + 1, why=str(e))
        return _new(run, number + 1 if account.charges or numbers else number)


def _taken_up(run: Path, number: int, account: Account) -> Incarnation:
    key, log = key_file(run, number), log_file(run, number)
    charged = account.rounds_of(number)
    if not key.exists():
        raise DamagedError(f"{key.name} is not there")
    if not log.exists() and charged:
        raise DamagedError(f"{log.name} is not there")
    taken_up = SentLog(log)
    sent = {t for t, *_ in taken_up.draws}
    if beyond := sent - set(charged):
        raise PdslError(
            f"{run / 'ledger.json'} does not account for round {max(beyond)}, which {log.name} says was sent;"
            " restore the newest ledger"
        )
    if missing := set(charged[:-1]) - sent:  # of the last one, nothing may have been made yet
        taken_up.close()
        raise DamagedError(f"{log.name} has nothing of round {min(missing)}, which was charged")
    content = read_private(key)
    if len(content) != KEY_BYTES:
        raise DamagedError(f"{key.name} is damaged")
    return Incarnation(number, content, taken_up)


def _new(run: Path, number: int) -> Incarnation:
    key = system.token_bytes(KEY_BYTES)
    write_whole(key_file(run, number), key, PRIVATE)
    return Incarnation(number, key, SentLog(log_file(run, number)))
