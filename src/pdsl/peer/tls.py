"""Mutual TLS 1.3 between pinned certificates; there is no other mode.

Python's own `ssl` sets the minimum version. The pins are the only trust anchors, and after the handshake both ends
compare the other's certificate with the pins byte for byte. Dates are not checked, because pinned certificates never
expire and a wrong clock must not stop a peer. Sessions are never resumed, so a revoked certificate has no way around
the comparison.
"""

import os
import ssl
from collections.abc import Iterable

from pdsl.peer.identity import Identity

NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python does not name


def server_context(own: Identity, pinned: Iterable[str]) -> ssl.SSLContext:
    """Context of a server that requires a pinned certificate of its clients."""
    context = _create_context(ssl.PROTOCOL_TLS_SERVER, own, pinned)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0
    return context


def client_context(own: Identity, pinned: Iterable[str]) -> ssl.SSLContext:
    """Context of a client that requires a pinned certificate for the name of its callee."""
    return _create_context(ssl.PROTOCOL_TLS_CLIENT, own, pinned)


def der(pem: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem)


def _create_context(protocol: int, own: Identity, pinned: Iterable[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= NO_CHECK_TIME
    if anchors := "".join(pinned):  # without pins there is no anchor, and every handshake fails
        context.load_verify_locations(cadata=anchors)
    certificate, key = _as_pipe(own.card.certificate.encode()), _as_pipe(own.key)
    try:
        context.load_cert_chain(f"/dev/fd/{certificate}", f"/dev/fd/{key}")
    finally:
        os.close(certificate)
        os.close(key)
    return context


def _as_pipe(content: bytes) -> int:
    """Descriptor from which a small content can be read once: OpenSSL reads keys from files only."""
    reading, writing = os.pipe()
    try:
        os.write(writing, content)  # less than a pipe holds
    finally:
        os.close(writing)
    return reading
