"""Connections to one member for requests: dialling, reuse, and connections that a neighbour has opened for us.

A neighbour that cannot be called opens connections itself and reverses them (`/reverse`): then we send the requests.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from pdsl.peer import tls
from pdsl.peer.http1 import HttpConnection, Response, Stream
from pdsl.peer.identity import NO_ADDRESS, Identity, PeerInfo
from pdsl.peer.streams import connect, start_tls
from pdsl.peer.trust_store import TrustStore

MAX_REVERSED = 4  # connections that a neighbour can open for our requests

Dial = Callable[[], Awaitable[Stream]]


class NoPinError(Exception):
    """No certificate of the member is pinned, so it is not called."""


class ConnectionPool:
    """Connections to one member that accept its current pins and nothing else."""

    def __init__(self, own: Identity, card: PeerInfo, trust_store: TrustStore, dial: Dial | None = None):
        """`dial` opens a stream to a member without an address; without it, the member has to open connections."""
        self._own, self._card, self._trust_store = own, card, trust_store
        self._dial_stream = dial
        if dial is None and card.address != NO_ADDRESS:
            self._dial_stream = lambda: connect(card.address)
        self._pinned: tuple[str, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._reversed: list[HttpConnection] = []  # opened by the neighbour, oldest first
        self._available = asyncio.Event()
        self._stopped = False

    async def request(self, path: str, body: bytes, max_body: int) -> Response:
        """Send one request over an idle connection or a new one."""
        context = self._current_context()
        connection = await self._acquire(context)
        self._busy.add(connection)
        try:
            response = await connection.request(path, self._card.name, body, max_body)
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if context is self._context and connection.usable:
            self._idle.append(connection)
            self._available.set()
        else:
            connection.close()
        return response

    async def dial(self) -> HttpConnection:
        """Open a connection that does not belong to the pool."""
        return await self._dial(self._current_context())

    def adopt(self, connection: HttpConnection) -> None:
        """Use a connection that the neighbour has opened and reversed."""
        self._reversed = [other for other in self._reversed if not other.writer.is_closing()]
        self._reversed.append(connection)
        if len(self._reversed) > MAX_REVERSED:
            self._reversed.pop(0).close()
        self._idle = [*(other for other in self._idle if not other.writer.is_closing()), connection]
        self._available.set()

    def close(self) -> None:
        """Close all connections. Requests in progress fail."""
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle = []

    def stop(self) -> None:
        """Close all connections and open no more."""
        self._stopped = True
        self.close()

    @property
    def is_open(self) -> bool:
        return bool(self._idle or self._busy)

    def _current_context(self) -> ssl.SSLContext:
        """TLS context of the current pins. A change of pins closes all connections."""
        if self._stopped:
            raise ConnectionError("stopped")
        pinned = self._trust_store.accepted(self._card.name)
        if pinned != self._pinned or self._context is None:
            if self._pinned:
                self.close()
            self._pinned, self._context = pinned, tls.client_context(self._own, pinned) if pinned else None
        if self._context is None:
            raise NoPinError
        return self._context

    async def _acquire(self, context: ssl.SSLContext) -> HttpConnection:
        """An idle connection, or a new one, or the next one that the neighbour opens."""
        while (connection := self._take_idle()) is None:
            if self._dial_stream is not None and all(other.writer.is_closing() for other in self._reversed):
                return await self._dial(context)
            self._available.clear()
            await self._available.wait()
        return connection

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _dial(self, context: ssl.SSLContext) -> HttpConnection:
        if self._dial_stream is None:
            raise ConnectionError("no address")
        return await start_tls(await self._dial_stream(), context, self._pinned, self._card.name)
