"""Relay: a member with an address that connects two neighbours without addresses.

One of the two waits at the relay (`/listen`), the other one calls (`/connect`). From then on the relay passes bytes in
both directions. The two start TLS with each other inside, so the relay sees only what an eavesdropper would see.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

from pdsl.peer.http1 import FAILED, HttpConnection
from pdsl.peer.messages import RefusedError, RelayRequest
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.routes import find_relayed_pairs
from pdsl.peer.streams import pass_bytes

READY = b"\x06"  # of the waiting member, when it is about to start TLS
READY_SECONDS = 5.0
MAX_WAITING = 4  # connections that wait for a pair
MAX_TUNNELS = 24  # for a pair
IDLE_SECONDS = 120.0  # without a byte in either direction
RESPOND_SECONDS = 10.0
OK, NOT_FOUND = 200, 404


class Relay:
    """Connections that wait for a partner, and tunnels between members."""

    def __init__(self, plan: TrainingPlan, me: int):
        self._plan, self._pairs = plan, find_relayed_pairs(plan, me)
        self._waiting: dict[tuple[int, int], list[HttpConnection]] = defaultdict(list)  # (waiting, calling)
        self._tunnels: Counter[tuple[int, int]] = Counter()
        self._ends: dict[HttpConnection, int] = {}  # all connections taken over → member

    async def take(self, j: int, connection: HttpConnection, path: str, body: bytes) -> bool:
        """Take over a connection of member j that waits or calls. Returns whether it still answers requests."""
        other = RelayRequest.decode(body, self._plan.accepts).peer
        if (j, other) not in self._pairs:
            raise RefusedError("relay")
        self._ends[connection] = j
        if path == "/listen":
            waiting = self._waiting[j, other]
            waiting.append(connection)
            if len(waiting) > MAX_WAITING:
                waiting.pop(0).close()
            return False
        pair = other, j
        found = await self._find_waiting(pair) if self._tunnels[pair] < MAX_TUNNELS else None
        if found is None:
            return await connection.respond(NOT_FOUND, b"not here", RESPOND_SECONDS)
        self._tunnels[pair] += 1
        try:
            await connection.respond(OK, b"", RESPOND_SECONDS)
            await pass_bytes(found.stream, connection.stream, IDLE_SECONDS)
        finally:
            self._tunnels[pair] -= 1
            found.close()
            connection.close()
        return False

    async def _find_waiting(self, pair: tuple[int, int]) -> HttpConnection | None:
        """The newest connection that still works."""
        while self._waiting[pair]:
            found = self._waiting[pair].pop()
            try:
                async with asyncio.timeout(READY_SECONDS):
                    await found.respond(OK, b"", RESPOND_SECONDS)
                    if await found.reader.readexactly(1) == READY:
                        return found
            except FAILED:
                pass
            found.close()
        return None

    def drop_unless(self, is_pinned: Callable[[int, bytes], bool]) -> None:
        """Close connections of certificates that are not pinned any more."""
        for connection, j in list(self._ends.items()):
            if connection.writer.is_closing():
                del self._ends[connection]
            elif not is_pinned(j, connection.certificate):
                connection.close()

    def close(self) -> None:
        for connection in self._ends:
            connection.close()
