"""Streams to other members: direct, through an HTTP proxy, or inside another connection, always with pinned TLS."""

import asyncio
import base64
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from pdsl.peer import tls
from pdsl.peer.http1 import FAILED, READ_BYTES, HttpConnection, Stream

HANDSHAKE_SECONDS = 5.0
CLOSE_SECONDS = 2.0  # to end a TLS connection
PROXY_SECONDS = 10.0  # for a proxy to connect
HAPPY_EYEBALLS_DELAY = 0.25  # seconds before the next address of a host is tried in parallel
MAX_PROXY_ANSWER = 8192  # bytes


class NotPinnedError(ssl.SSLError):
    """The other end has a certificate that is not pinned, although it passed the checks of TLS."""


async def connect(address: str) -> Stream:
    """Open a stream to host:port without TLS, through the proxy of the environment variables if there is one."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    proxy = find_proxy(host)
    stream = await (_connect_proxy(proxy, address) if proxy else _open(host, int(port)))
    with suppress(OSError):
        stream.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return stream


def find_proxy(host: str) -> str | None:
    """URL of the proxy for a host, from `https_proxy` and `no_proxy`; None for a local host."""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    if host == "localhost" or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get("https")


async def _open(host: str, port: int, context: ssl.SSLContext | None = None) -> Stream:
    opened = await asyncio.open_connection(
        host,
        port,
        limit=READ_BYTES,
        ssl=context,
        ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS,
        happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY,
    )
    return Stream(*opened)


async def _connect_proxy(url: str, address: str) -> Stream:
    """Ask an HTTP proxy for a connection to an address."""
    proxy = urlsplit(url if "://" in url else f"http://{url}")
    context = ssl.create_default_context() if proxy.scheme == "https" else None
    reader, writer, _ = stream = await _open(proxy.hostname or "", proxy.port or (443 if context else 80), context)
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.username is not None:
        credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}")
    writer.write("\r\n".join([*lines, "", ""]).encode())
    try:
        async with asyncio.timeout(PROXY_SECONDS):
            answer = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError) as e:
        writer.transport.abort()
        raise ConnectionError("the proxy does not answer") from e
    if len(answer) > MAX_PROXY_ANSWER or answer.split(b" ", 2)[1:2] != [b"200"]:
        writer.transport.abort()
        raise ConnectionError("the proxy refuses the connection")
    return stream


async def start_tls(
    stream: Stream, context: ssl.SSLContext, pinned: Collection[str], hostname: str | None
) -> HttpConnection:
    """Start TLS on a stream: as the client of `hostname`, or as the server if it is None."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(READ_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    handshake, closing = HANDSHAKE_SECONDS, CLOSE_SECONDS
    transport: asyncio.Transport | None
    try:
        if stream.writer.get_extra_info("ssl_object") is None:
            transport = await loop.start_tls(
                stream.writer.transport,
                protocol,
                context,
                server_hostname=hostname,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=closing,
            )
            assert transport is not None
            protocol.connection_made(transport)
        elif hostname is None:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                _bridge(stream),
                ssl=context,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=closing,
            )
        else:
            transport, _ = await loop.create_connection(
                lambda: protocol,
                sock=_bridge(stream),
                ssl=context,
                server_hostname=hostname,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=closing,
            )
    except BaseException:
        stream.writer.transport.abort()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    if certificate not in map(tls.der, pinned):
        transport.abort()
        raise NotPinnedError("certificate not pinned")
    return HttpConnection(reader, writer, certificate, hostname is None, stream)


def _bridge(stream: Stream) -> socket.socket:
    """A socket for TLS inside a TLS stream, which asyncio of Python 3.11 does not support without faults."""
    inner, outer = socket.socketpair()
    inner.setblocking(False)
    task = asyncio.create_task(_run_bridge(stream, outer))
    _bridges.add(task)
    task.add_done_callback(_bridges.discard)
    return inner


_bridges: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to tasks


async def _run_bridge(stream: Stream, outer: socket.socket) -> None:
    local = Stream(*await asyncio.open_connection(sock=outer, limit=READ_BYTES))
    try:
        await pass_bytes(stream, local, None)
    finally:
        for end in (stream, local):
            end.writer.transport.abort()


async def pass_bytes(a: Stream, b: Stream, idle: float | None) -> None:
    """Pass bytes in both directions until one end closes, or sends nothing for `idle` seconds."""
    tasks = [asyncio.create_task(_copy(a.reader, b.writer, idle)), asyncio.create_task(_copy(b.reader, a.writer, idle))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: float | None) -> None:
    try:
        while True:
            async with asyncio.timeout(idle):
                data = await reader.read(READ_BYTES)
                if not data or writer.is_closing():
                    return
                writer.write(data)
                await writer.drain()
    except FAILED:
        return
