"""Mutual TLS 1.3 between pinned certificates; there is no other mode.

gRPC for Python has no option for the minimum TLS version. The keys of peers are on an elliptic curve, so TLS 1.2 is
restricted to an RSA cipher, with which no handshake can succeed on either side. TLS 1.3 has its own ciphers. gRPC reads
this from the environment at its first use. In addition, the server checks the TLS version of every call.
"""

import os
from typing import Any

from pdsl.peer.identity import Identity
from pdsl.peer.messages import MAX_CONTROL
from pdsl.utils.errors import PdslError

TLS_VERSION = b"TLSv1.3"
TLS12_CIPHER = "ECDHE-RSA-AES256-GCM-SHA384"  # the only cipher allowed for TLS 1.2; it needs an RSA key
MAX_STREAMS = 16  # open requests per neighbour


def load_grpc() -> Any:
    """Import grpc after setting the environment variables that it reads at first use."""
    os.environ["GRPC_SSL_CIPHER_SUITES"] = TLS12_CIPHER
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        import grpc
        import grpc.aio
    except ImportError as e:
        raise PdslError("peer mode needs grpcio; install it with: pip install grpcio") from e
    return grpc


def server_credentials(grpc: Any, own: Identity, pinned: list[str]) -> Any:
    """Server credentials that accept only clients with a pinned certificate."""
    assert pinned  # with an empty list, gRPC would trust the certificate authorities of the operating system
    pair = (own.key, own.card.certificate.encode())
    return grpc.ssl_server_credentials([pair], "".join(pinned).encode(), require_client_auth=True)


def open_channel(grpc: Any, own: Identity, name: str, address: str, pinned: list[str], max_bytes: int) -> Any:
    """Open a channel to a neighbour that must present one of its pinned certificates for its name."""
    assert pinned  # as in server_credentials
    credentials = grpc.ssl_channel_credentials("".join(pinned).encode(), own.key, own.card.certificate.encode())
    options = [
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel opens a new connection
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.secure_channel(address, credentials, options=options)


def create_server(grpc: Any, neighbours: int) -> Any:
    options = [
        ("grpc.max_receive_message_length", MAX_CONTROL),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", 8192),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
    return grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_STREAMS * (neighbours + 1))
