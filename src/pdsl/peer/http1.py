"""HTTP/1.1 connections with limits, on asyncio streams and the parser h11.

A connection carries one request at a time. The limits are on the size of headers and bodies, and on the time to receive
a request once it has started.
"""

import asyncio
import ssl
from typing import NamedTuple

from pdsl.peer.messages import RefusedError
from pdsl.utils.errors import PdslError

try:
    import h11
except ImportError as e:
    raise PdslError("peer mode needs h11; install it with: pip install h11") from e

MAX_HEADERS = 8192  # bytes of the first line and the headers of a message
READ_BYTES = 1 << 18
REQUEST_SECONDS = 10.0  # to receive a whole request, from its first byte
BYTES_TYPE = (b"Content-Type", b"application/octet-stream")
FAILED = (OSError, EOFError, TimeoutError, ssl.SSLError, h11.ProtocolError)  # of a connection or the other end's HTTP


class TooLargeError(RefusedError):
    """A body is larger than allowed."""

    def __init__(self) -> None:
        super().__init__("size")


class Stream(NamedTuple):
    """Both directions of a connection.

    `below` is kept because asyncio closes a connection whose reader is collected.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    below: object = None


class Exchange(NamedTuple):
    """Request that a server received."""

    method: str
    path: str
    body: bytes


class Response(NamedTuple):
    status: int
    body: bytes


class HttpConnection:
    """Either end of a connection to a peer whose certificate was compared with its pins."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        certificate: bytes,
        is_server: bool,
        below: object = None,
    ):
        self.reader, self.writer = reader, writer
        self.certificate = certificate  # of the other end, DER
        self._is_server = is_server
        self._below = below
        self._h11 = h11.Connection(h11.SERVER if is_server else h11.CLIENT, MAX_HEADERS)

    @property
    def usable(self) -> bool:
        """Whether a request can be sent."""
        return self._h11.our_state is h11.IDLE and not (self.reader.at_eof() or self.writer.is_closing())

    @property
    def stream(self) -> Stream:
        return Stream(self.reader, self.writer, self._below)

    def reverse(self) -> "HttpConnection":
        """The same connection with exchanged roles: the server sends requests from now on."""
        made = HttpConnection(self.reader, self.writer, self.certificate, not self._is_server, self._below)
        if ahead := self._h11.trailing_data[0]:  # a request may follow the last response at once
            made._h11.receive_data(ahead)
        return made

    def close(self) -> None:
        """Close at once, without waiting for the other end."""
        self.writer.transport.abort()

    # Server side

    async def receive(self, max_body: int, idle: float) -> Exchange | None:
        """Receive the next request; None if the other end closed the connection or sent nothing for `idle` seconds."""
        if not self._h11.trailing_data[0]:
            try:
                async with asyncio.timeout(idle):
                    first = await self.reader.read(READ_BYTES)
            except TimeoutError:
                return None
            if not first:
                return None
            self._h11.receive_data(first)
        async with asyncio.timeout(REQUEST_SECONDS):
            request = await self._next_event()
            if not isinstance(request, h11.Request):
                return None
            body = await self._read_body(request, max_body)
        return Exchange(request.method.decode("ascii"), request.target.decode("ascii"), body)

    async def respond(self, status: int, body: bytes, seconds: float) -> bool:
        """Send a response. Returns whether the connection can carry another request."""
        headers = [(b"Content-Length", b"%d" % len(body)), BYTES_TYPE]
        async with asyncio.timeout(seconds):
            await self._send(h11.Response(status_code=status, headers=headers), body)
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return not self._h11.trailing_data[0]  # a client that sends requests ahead of responses is not served

    # Client side

    async def request(self, path: str, host: str, body: bytes, max_body: int) -> Response:
        """Send a request and receive the response. Any failure leaves the connection unusable."""
        headers = [(b"Host", host.encode()), (b"Content-Length", b"%d" % len(body)), BYTES_TYPE]
        await self._send(h11.Request(method="POST", target=path, headers=headers), body)
        response = await self._next_event()
        if not isinstance(response, h11.Response):  # nor an informational one: a flood of them would cost time
            raise EOFError
        content = await self._read_body(response, max_body)
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return Response(response.status_code, content)

    # Both

    async def _send(self, head: h11.Request | h11.Response, body: bytes) -> None:
        if self.writer.is_closing():
            raise ConnectionError("closed")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            pieces = self._h11.send_with_data_passthrough(event)
            assert pieces is not None  # only after ConnectionClosed
            for piece in pieces:
                if piece:
                    self.writer.write(piece)
        await self.writer.drain()

    async def _next_event(self) -> object:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self.reader.read(READ_BYTES))
        return event

    async def _read_body(self, head: h11.Request | h11.Response, max_body: int) -> bytes:
        headers = dict(head.headers)
        if b"transfer-encoding" in headers:  # peers do not send it, and many small chunks would cost time
            raise h11.RemoteProtocolError("chunked body")
        if int(headers.get(b"content-length", b"0")) > max_body:
            raise TooLargeError
        pieces, size = [], 0
        while isinstance(event := await self._next_event(), h11.Data):
            size += len(event.data)
            if size > max_body:
                raise TooLargeError
            pieces.append(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise EOFError
        return b"".join(pieces)
