"""Faults planted in the protocol between peers, each of which the simulation must find.

A fault replaces a function of `pdsl.peer` while its context is open.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from pdsl.peer import client, noise_log, runner
from pdsl.peer.attendance import Attendance
from pdsl.peer.calls import Calls
from pdsl.peer.client import Client
from pdsl.peer.engine import PeerEngine
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.messages import Header
from pdsl.peer.noise_log import Generation, Generations, LoggedNoise, NoiseLog
from pdsl.peer.state import ServerState
from pdsl.privacy import Noise
from pdsl.runs.directory import RunDirectory

Plant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, name, value in changes:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def charge_after_send() -> AbstractContextManager[None]:
    """The ledger is written at the end of a round instead of before its first message."""
    write, append = RunDirectory.write, RunDirectory.append

    def write_later(self: Any, name: str, content: bytes, mode: int = 0o644) -> None:
        if name == runner.LEDGER and b'"charges": []' not in content:
            self.pending = content
        else:
            write(self, name, content, mode)

    def append_after(self: Any, record: Any) -> None:
        if hasattr(self, "pending"):
            write(self, runner.LEDGER, self.pending)
        append(self, record)

    marker = (runner, "write_charge_marker", lambda own, plan, t: None)
    return _replaced((RunDirectory, "write", write_later), (RunDirectory, "append", append_after), marker)


def noise_of_the_last_process() -> AbstractContextManager[None]:
    """A restarted process continues with the old key and generation, and does not look at the log."""
    choose = Generations.choose

    def choose_previous(self: Generations, t: int, present: frozenset[int], ledger: PeerLedger) -> Generation:
        return self._previous or choose(self, t, present, ledger)

    def record(self: NoiseLog, digests: dict[noise_log.Draw, str]) -> None:
        self._append([[*draw, digest] for draw, digest in digests.items()])
        self._digests |= digests

    return _replaced((Generations, "choose", choose_previous), (NoiseLog, "record", record))


def message_of_another_round() -> AbstractContextManager[None]:
    """A peer serves the message of the round before if there is none yet, and the receiver ignores the header."""
    find, decode = ServerState._find_response, client.decode

    def find_any(self: ServerState, j: int, t: int, phase: int) -> bytes | None:
        found, (before, _, old) = find(self, j, t, phase), self._previous
        return self._send(j, before, phase, old[phase, j]) if found is None and (phase, j) in old else found

    def decode_any(content: bytes, expected: Any, d: int) -> Any:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        numbers = (int(header[name]) for name in ("round", "phase", "sender", "receiver"))
        return decode(content, Header(header["plan"], *numbers), d)

    return _replaced((ServerState, "_find_response", find_any), (client, "decode", decode_any))


def one_sided_exclusion() -> AbstractContextManager[None]:
    """A neighbour that is lost during a round is replaced silently: the row does not record it."""
    exchange = PeerEngine._exchange

    def exchange_silently(self: PeerEngine, rows: Any, own: Any) -> Any:
        received = exchange(self, rows, own)
        self.lost = {}
        return received

    return _replaced((PeerEngine, "_exchange", exchange_silently))


def repeated_round_without_a_record() -> AbstractContextManager[None]:
    """A round that is repeated after a crash forgets the neighbours of the first attempt (a fault of earlier code)."""
    return _replaced((PeerLedger, "peers_in", lambda self, t: frozenset()))


def double_charge_on_retry() -> AbstractContextManager[None]:
    """A round that is repeated after a crash is charged again although nothing was made before the crash."""
    return _replaced((Generations, "refund", lambda self, t, ledger: ledger))


def refund_of_sent_vectors() -> AbstractContextManager[None]:
    """A round that is repeated after a crash is refunded although its vectors may have left."""

    def refund(self: Generations, t: int, ledger: PeerLedger) -> PeerLedger:
        return ledger if self._previous is None else ledger.refund(t, self._previous.number)

    return _replaced((Generations, "refund", refund))


def ledger_without_sync() -> AbstractContextManager[None]:
    """The ledger and other files are written without fsync, so a power failure loses them."""

    def write(self: RunDirectory, name: str, content: bytes, mode: int = 0o644) -> None:
        aside = self.path / f"{name}.part"
        aside.write_bytes(content)
        aside.replace(self.path / name)

    return _replaced((RunDirectory, "write", write), (runner, "write_charge_marker", lambda own, plan, t: None))


def noise_log_without_sync() -> AbstractContextManager[None]:
    """The noise log is written without fsync: a power failure loses it after its vectors have left."""

    def append(self: NoiseLog, values: list[list[int | str]]) -> None:
        lines = "".join(json.dumps(value) + "\n" for value in values).encode()
        os.write(self._file, lines)
        self._content.update(lines)
        self._size += len(lines)

    return _replaced((NoiseLog, "_append", append))


def unsynced_log_of_a_killed_process() -> AbstractContextManager[None]:
    """A process relies on lines of a log that the process before has not synced (a fault of earlier code)."""
    init = NoiseLog.__init__

    def open_unsynced(self: NoiseLog, *arguments: Any, **options: Any) -> None:
        with mock.patch.object(os, "fsync", lambda file: None):
            init(self, *arguments, **options)

    return _replaced((NoiseLog, "__init__", open_unsynced))


def vectors_before_their_log() -> AbstractContextManager[None]:
    """Noisy vectors can leave before the log has their digests: they are logged at the end of the round."""
    append = RunDirectory.append
    waiting: dict[Path, list[tuple[NoiseLog, dict[noise_log.Draw, str]]]] = {}

    def add(self: Any, t: int, makers: Any, peers: Any, g: Any, step: int = 0, nth: int = 0) -> Any:
        noisy = Noise.add(self, t, makers, peers, g, step, nth)
        digests = {
            (t, step, nth, int(peer)): hashlib.sha256(row.numpy().tobytes()).hexdigest()
            for peer, row in zip(peers, noisy, strict=True)
        }
        waiting.setdefault(self.log.path.parent, []).append((self.log, digests))
        self.on_release(t, digests)
        return noisy

    def append_after(self: RunDirectory, record: Any) -> None:
        for log, digests in waiting.pop(self.path, []):
            log.record(digests)
        append(self, record)

    return _replaced((LoggedNoise, "add", add), (RunDirectory, "append", append_after))


def second_charge_in_a_round() -> AbstractContextManager[None]:
    """A charge has another generation than the noise of its round."""
    charge = PeerLedger.charge

    def charge_other(self: PeerLedger, t: int, generation: int, peers: frozenset[int], mark: Any = (0, "")) -> Any:
        charged = charge(self, t, generation, peers, mark)
        return charge(charged, t, generation + 1, peers, mark) if t == 2 else charged

    return _replaced((PeerLedger, "charge", charge_other))


def neighbour_missing_in_the_charge() -> AbstractContextManager[None]:
    """A neighbour that arrives at the end of the roll call gets vectors that are not charged."""
    charge = PeerLedger.charge

    def charge_fewer(self: PeerLedger, t: int, generation: int, peers: frozenset[int], mark: Any = (0, "")) -> Any:
        return charge(self, t, generation, frozenset(sorted(peers)[1:]), mark)

    return _replaced((PeerLedger, "charge", charge_fewer))


def call_on_a_dead_connection() -> AbstractContextManager[None]:
    """A call has no limit of its own: it waits while other calls are answered (a fault of earlier code)."""
    call = Calls.call

    async def call_without_limit(self: Calls, j: int, path: str, content: bytes, limit: float = 0.0) -> bytes | None:
        return await call(self, j, path, content)

    return _replaced((Calls, "call", call_without_limit))


def endless_wait() -> AbstractContextManager[None]:
    """A peer waits for ever for a neighbour that it has once awaited."""
    return _replaced(
        (Attendance, "give_up", lambda self, j: None), (Client, "_exclude_late", lambda self, wait, attendance: None)
    )


def lost_cancellation() -> AbstractContextManager[None]:
    """A roll call continues if it is cancelled at the moment of a change of state (a fault of earlier code)."""

    async def wait_for_change(self: ServerState, until: float) -> bool:
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({changed}, timeout=max(0.0, until - time.monotonic()))
        except asyncio.CancelledError:
            if changed.done():
                return True
            changed.cancel()
            raise
        if in_time := changed.done():
            return in_time
        changed.cancel()
        await asyncio.wait({changed})
        return in_time

    return _replaced((ServerState, "wait_for_change", wait_for_change))


FAULTS: dict[str, tuple[Plant, str]] = {
    plant.__name__: (plant, rule)
    for plant, rule in (
        (charge_after_send, "ledger"),
        (noise_of_the_last_process, "noise"),
        (message_of_another_round, "message"),
        (one_sided_exclusion, "message"),
        (repeated_round_without_a_record, "mixing"),
        (double_charge_on_retry, "ledger"),
        (refund_of_sent_vectors, "ledger"),
        (ledger_without_sync, "ledger"),
        (noise_log_without_sync, "noise"),
        (unsynced_log_of_a_killed_process, "noise"),
        (vectors_before_their_log, "noise"),
        (second_charge_in_a_round, "ledger"),
        (neighbour_missing_in_the_charge, "charge"),
        (call_on_a_dead_connection, "no end"),
        (endless_wait, "no end"),
        (lost_cancellation, "continued after its cancellation: Client.roll_call"),
    )
}
