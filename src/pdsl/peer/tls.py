"""Mutual TLS 1.3 between pinned certificates, and nothing else.

gRPC for Python has no setting for the lowest version of TLS. Peers' keys are on an elliptic curve, so with RSA ciphers
alone allowed for TLS 1.2 no handshake of that version can succeed, at either end; TLS 1.3 has its own ciphers. gRPC
reads this from the environment when it is first used. The server checks the version of every call besides.
"""

import os
from typing import Any

from pdsl.errors import PdslError
from pdsl.peer.identity import Identity
from pdsl.peer.wire import SMALL

VERSION = b"TLSv1.3"
UNUSABLE = "ECDHE-RSA-AES256-GCM-SHA384"  # the only cipher left to TLS 1.2, which none of our keys can serve
STREAMS = 16  # requests that one neighbour may have open


def load() -> Any:
    """The grpc package, with what must be settled before its first use."""
    os.environ["GRPC_SSL_CIPHER_SUITES"] = UNUSABLE
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        import grpc
        import grpc.aio
    except ImportError as e:
        raise PdslError("peer mode needs grpcio; install it with: pip install 'pdsl[peer]'") from e
    return grpc


def server_credentials(grpc: Any, own: Identity, pinned: list[str]) -> Any:
    """Callers must show one of the pinned certificates; which of them, the server looks at call by call."""
    assert pinned  # likewise
    pair = (own.key, own.card.certificate.encode())
    return grpc.ssl_server_credentials([pair], "".join(pinned).encode(), require_client_auth=True)


def channel(grpc: Any, own: Identity, name: str, address: str, pinned: list[str], most_bytes: int) -> Any:
    """A channel to a neighbour that must show one of its own pinned certificates, for its own name."""
    assert pinned  # without any, gRPC would trust whom the operating system trusts
    credentials = grpc.ssl_channel_credentials("".join(pinned).encode(), own.key, own.card.certificate.encode())
    options = [
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.secure_channel(address, credentials, options=options)


def server(grpc: Any, neighbours: int) -> Any:
    options = [
        ("grpc.max_receive_message_length", SMALL),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_metadata_size", 8192),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
    return grpc.aio.server(options=options, maximum_concurrent_rpcs=STREAMS * (neighbours + 1))
