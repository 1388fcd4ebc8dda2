"""Outgoing connections to one neighbour: dialling, reuse, and the check of the neighbour's certificate."""

import asyncio
import ssl

from pdsl.peer import tls
from pdsl.peer.http1 import READ_BYTES, HttpConnection, Response
from pdsl.peer.identity import Identity, PeerInfo
from pdsl.peer.listener import CLOSE_SECONDS, HANDSHAKE_SECONDS
from pdsl.peer.trust_store import TrustStore

HAPPY_EYEBALLS_DELAY = 0.25  # seconds before the next address of a host is tried in parallel


class NoPinError(Exception):
    """No certificate of the neighbour is pinned, so it is not called."""


class NotPinnedError(ssl.SSLError):
    """The callee has a certificate that is not pinned, although it passed the checks of TLS."""


class ConnectionPool:
    """Connections to one neighbour that accept its current pins and nothing else."""

    def __init__(self, own: Identity, card: PeerInfo, trust_store: TrustStore):
        self._own, self._card, self._trust_store = own, card, trust_store
        self._pinned: tuple[str, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._stopped = False

    async def request(self, path: str, body: bytes, max_body: int) -> Response:
        """Send one request over an idle connection or a new one."""
        if self._stopped:
            raise ConnectionError("stopped")
        context = self._current_context()
        connection = self._take_idle() or await self._dial(context)
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
        else:
            connection.close()
        return response

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
        pinned = self._trust_store.accepted(self._card.name)
        if pinned != self._pinned or self._context is None:
            self.close()
            self._pinned, self._context = pinned, tls.client_context(self._own, pinned) if pinned else None
        if self._context is None:
            raise NoPinError
        return self._context

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _dial(self, context: ssl.SSLContext) -> HttpConnection:
        host, _, port = self._card.address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host.strip("[]"),
            int(port),
            limit=READ_BYTES,
            ssl=context,
            server_hostname=self._card.name,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=CLOSE_SECONDS,
            happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY,
        )
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if certificate not in map(tls.der, self._pinned):
            writer.transport.abort()
            raise NotPinnedError("certificate not pinned")
        return HttpConnection(reader, writer, certificate, is_server=False)
