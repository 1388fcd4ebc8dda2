"""An organisation's secret key for noise and batches, and the log that goes with it: its incarnation.

Key and log are only good together. With the key alone, nobody knows what its noise was used on already; so if one of
them is lost, both are made anew under the next number, and what is sent from then on is charged besides.
"""

import secrets as system
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pdsl.errors import PdslError
from pdsl.files import PRIVATE, read_private, write_whole
from pdsl.peer.account import Account
from pdsl.peer.events import Events
from pdsl.peer.sent import DamagedError, SentLog
from pdsl.randomness import KEY_BYTES
from pdsl.runs import Row


class Incarnation(NamedTuple):
    number: int
    key: bytes
    log: SentLog


def key_file(run: Path, number: int) -> Path:
    return run / f"secret-{number}.key"


def log_file(run: Path, number: int) -> Path:
    return run / f"sent-{number}.log"


def _numbers(run: Path, pattern: str) -> list[int]:
    """Numbers of the incarnations that have such a file; other names are ignored."""
    named = (file.stem.partition("-")[2] for file in run.glob(pattern))
    return sorted(int(number) for number in named if number.isdecimal())


def incarnate(run: Path, account: Account, events: Events) -> Incarnation:
    """The incarnation to go on with: the last one, or a new one if its key or log is lost."""
    numbers = _numbers(run, "secret-*.key")
    number = max([account.incarnation, *numbers])
    try:
        return _taken_up(run, number, account)
    except DamagedError as e:
        if account.charges:
            events.log("new incarnation", number=number + 1, why=str(e))
        return _new(run, number + 1 if account.charges or numbers else number)


def _taken_up(run: Path, number: int, account: Account) -> Incarnation:
    key, log = key_file(run, number), log_file(run, number)
    if not key.exists():
        raise DamagedError(f"{key.name} is not there")
    if not log.exists() and account.rounds_of(number):
        raise DamagedError(f"{log.name} is not there")
    content = read_private(key)
    if len(content) != KEY_BYTES:
        raise DamagedError(f"{key.name} is damaged")
    return Incarnation(number, content, SentLog(log, content, account.mark_of(number)))


def check_account(run: Path, account: Account, rows: Iterable[Row]) -> None:
    """PdslError unless all is charged that the logs say was sent, and the rows say was run."""
    for t in (row["round"] for row in rows if "absent" not in row):
        if t > account.rounds:
            raise _forgetful(run, t, "rows.jsonl")
    for number in _numbers(run, "sent-*.log"):
        log = log_file(run, number)
        try:
            taken_up = SentLog(log)
        except DamagedError:
            continue  # nothing is known of it
        taken_up.close()
        for t, _, _, peer in taken_up.draws:
            charged = account.charges.get((t, number))
            if charged is None or peer not in charged | {account.me}:
                raise _forgetful(run, t, log.name)


def _forgetful(run: Path, t: int, witness: str) -> PdslError:
    return PdslError(
        f"{run / 'ledger.json'} does not account for all of round {t}, which {witness} says was sent; restore the"
        " newest ledger"
    )


def _new(run: Path, number: int) -> Incarnation:
    key = system.token_bytes(KEY_BYTES)
    write_whole(key_file(run, number), key, PRIVATE)
    return Incarnation(number, key, SentLog(log_file(run, number), key))
