"""Incoming connections: accept, TLS handshake, identification of the caller, and limits on all of them.

A caller costs little before it is identified: handshakes have a timeout, their number and their rate are limited per
address, and with too many of them the oldest are dropped. A caller is identified by its certificate alone, which must
equal a pinned certificate byte for byte. A refused caller is logged with a reason.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from pdsl.peer import tls
from pdsl.peer.http1 import READ_BYTES, HttpConnection
from pdsl.peer.identity import Identity
from pdsl.peer.limits import MIN_FREE_FILES, TokenBucket, raise_file_limit
from pdsl.peer.messages import RefusedError
from pdsl.peer.status import Events
from pdsl.peer.streams import CLOSE_SECONDS, HANDSHAKE_SECONDS
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError

MAX_HANDSHAKES = 256  # in progress
MAX_HANDSHAKES_PER_ADDRESS = 32
HANDSHAKE_RATE, HANDSHAKE_BURST = 50.0, 200.0  # per second and address
MAX_ADDRESSES = 10_000  # whose rate is remembered
BACKLOG = 128
RETRY_DELAY = 0.1  # seconds to wait if no more files can be opened

OnConnection = Callable[[int, HttpConnection], Coroutine[Any, Any, None]]


class Listener:
    """Listening sockets of one peer. `on_connection` serves a connection of an identified neighbour."""

    def __init__(
        self,
        own: Identity,
        trust_store: TrustStore,
        names: dict[str, int],
        events: Events,
        on_connection: OnConnection,
    ):
        self._own, self._trust_store, self._names, self._events = own, trust_store, names, events
        self._on_connection = on_connection
        self._context: ssl.SSLContext | None = None
        self._anchors: list[str] | None = None  # of the context
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], str] = {}  # in progress, oldest first → address
        self._serving: set[asyncio.Task[None]] = set()
        self._rates: dict[str, TokenBucket] = {}
        files = raise_file_limit()
        self._max_handshakes = MAX_HANDSHAKES
        if files is not None:
            self._max_handshakes = max(4, min(MAX_HANDSHAKES, (files - MIN_FREE_FILES) // 2))

    async def start(self, listen: str) -> int:
        """Start to listen on host:port. Returns the port."""
        host, _, port = listen.rpartition(":")
        try:
            self._sockets = [_listen(at) for at in await _resolve(host.strip("[]"), int(port))]
        except OSError as e:
            raise PdslError(f"cannot listen on {listen}: {e.strerror}; choose another address with --listen") from e
        self._accepting = [asyncio.create_task(self._accept(at)) for at in self._sockets]
        found: int = self._sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        for at in self._sockets:
            if at.fileno() >= 0:  # not closed yet; a caller at this moment would find a cancelled accept
                asyncio.get_running_loop().remove_reader(at)
        tasks = [*self._accepting, *self._handshakes, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for at in self._sockets:
            at.close()

    def identify(self, certificate: bytes) -> int:
        """Find the neighbour with this certificate (DER) among its pins."""
        for name, j in self._names.items():
            if any(certificate == tls.der(pem) for pem in self._trust_store.accepted(name)):
                return j
        raise RefusedError("certificate not pinned")

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):  # the oldest handshake makes room
                    self._drop_oldest(self._handshakes)
                    self._events.log("refused", what="connection", reason="too many open files")
                await asyncio.sleep(RETRY_DELAY)
                continue
            self._admit(connection, str(address[0]))

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Start a handshake, within the limits."""
        if len(self._rates) >= MAX_ADDRESSES:
            self._rates.clear()
        if not self._rates.setdefault(address, TokenBucket(HANDSHAKE_RATE, HANDSHAKE_BURST)).take():
            connection.close()
            self._events.log("refused", what="connection", address=address, reason="too many connections")
            return
        same = [task for task, of in self._handshakes.items() if of == address]
        if len(same) >= MAX_HANDSHAKES_PER_ADDRESS:
            self._drop_oldest(same)
        elif len(self._handshakes) >= self._max_handshakes:
            self._drop_oldest(self._handshakes)
        task = asyncio.create_task(self._shake_hands(connection, address))
        self._handshakes[task] = address
        task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    def _drop_oldest(self, handshakes: Iterable[asyncio.Task[None]]) -> None:
        for task in handshakes:
            self._handshakes.pop(task)
            task.cancel()
            return

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            reader = asyncio.StreamReader(READ_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self.current_context(),
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=CLOSE_SECONDS,
            )
        except (OSError, ssl.SSLError) as e:
            connection.close()
            if not isinstance(e, ConnectionResetError):  # a caller that gave up was not refused
                self._events.log("refused", what="handshake", address=address, reason=describe_failure(e))
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
            j = self.identify(certificate)
        except RefusedError as e:
            self._events.log("refused", what="handshake", address=address, reason=e.reason)
            transport.abort()
            return
        accepted = HttpConnection(reader, writer, certificate, is_server=True)
        serving = asyncio.create_task(self._on_connection(j, accepted))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    def current_context(self) -> ssl.SSLContext:
        """TLS context with the current pins as trust anchors."""
        anchors = [pem for name in self._names for pem in self._trust_store.accepted(name)]
        if self._context is None or anchors != self._anchors:
            self._context, self._anchors = tls.server_context(self._own, anchors), anchors
        return self._context


def describe_failure(error: Exception) -> str:
    """Reason of a failed handshake, in the words of the local TLS library."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'reason', None) or error.args[-1]}"
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "TLS: timeout"
    return f"TLS: {type(error).__name__}"


async def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listen(at: tuple[socket.AddressFamily, tuple[object, ...]]) -> socket.socket:
    family, address = at
    made = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    made.setblocking(False)
    return made
