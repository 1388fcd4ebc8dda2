"""One call to each neighbour and relay over a new connection, for `pdsl peer doctor` and `pdsl peer recover`.

The callee notes nothing about the call, and the connections of a running peer stay as they are.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from pdsl.peer.about import PATH, About
from pdsl.peer.connections import ConnectionPool, NoPinError
from pdsl.peer.dialling import Dialler
from pdsl.peer.http1 import FAILED, HttpConnection, Response
from pdsl.peer.identity import CARD, NO_ADDRESS, PINS, Identity
from pdsl.peer.messages import MAX_CONTROL, RefusedError
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.routes import find_relays
from pdsl.peer.server import FORBIDDEN, OK
from pdsl.peer.streams import NotPinnedError, find_proxy
from pdsl.peer.trust_store import TrustStore

PROBE_SECONDS = 10.0  # for a connection and one answer


class Contact(NamedTuple):
    """Result of a call to a member."""

    route: str  # way of the connection, in words
    about: About | None = None
    problem: str | None = None  # reason for the lack of an answer, and what to do
    seconds: float = 0.0  # from the start of the connection to the answer
    clock: float = 0.0  # seconds by which its clock is ahead


def probe_all(own: Identity, plan: TrainingPlan) -> dict[int, Contact | None]:
    """Call all neighbours and relays at once; None for a member that cannot be called and calls itself."""

    async def probe() -> dict[int, Contact | None]:
        me, trust_store = plan.agent(own.card.name), TrustStore(own.folder / PINS)
        neighbours = plan.neighbours(me)
        relays = {r for j in neighbours for r in find_relays(plan, me, j)} - set(neighbours)
        pools = Dialler(own, plan, trust_store).pools
        pools |= {r: ConnectionPool(own, plan.members[r], trust_store) for r in relays}
        contacts = await asyncio.gather(*(_probe(own, plan, j, pool) for j, pool in pools.items()))
        return dict(sorted(zip(pools, contacts, strict=True)))

    return asyncio.run(probe())


async def _probe(own: Identity, plan: TrainingPlan, j: int, pool: ConnectionPool) -> Contact | None:
    card, me = plan.members[j], plan.agent(own.card.name)
    relays = find_relays(plan, me, j)
    if card.address == NO_ADDRESS and (not relays or j < me):
        return None
    route = _describe_route(plan, card.address, relays)
    wall, start = time.time(), time.monotonic()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            connection = await pool.dial()
    except (*FAILED, NoPinError) as e:
        return Contact(route, problem=_describe_failure(e, own, card.name, card.address))
    asked = await _finish(_ask(connection, card.name), connection)
    seconds = time.monotonic() - start
    if isinstance(asked, str):
        return Contact(route, problem=asked.format(card=own.folder / CARD))
    return Contact(route, asked, None, seconds, asked.time - wall - seconds / 2)


async def _finish(asked: Awaitable[About | str], connection: HttpConnection) -> About | str:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await asked
    except TimeoutError:
        return "accepts the connection and does not answer; look at its log"
    except FAILED:  # in TLS 1.3 a server refuses a client's certificate after the client's handshake
        return "closes the connection: it has not pinned your certificate; send it {card}, or see its run/events.jsonl"
    finally:
        connection.close()


async def _ask(connection: HttpConnection, name: str) -> About | str:
    response: Response = await connection.request(PATH, name, b"{}", MAX_CONTROL)
    if response.status == FORBIDDEN:
        return "has revoked your certificate; send it {card}"
    with suppress(RefusedError):
        if response.status == OK:
            return About.decode(response.body)
    return "does not describe itself: its pdsl is older or damaged; install the same version on both sides"


def _describe_route(plan: TrainingPlan, address: str, relays: list[int]) -> str:
    if relays:
        return f"through a relay ({' or '.join(plan.members[r].name for r in relays)})"
    proxy = find_proxy(address.rpartition(":")[0].strip("[]"))
    if proxy is None:
        return f"directly at {address}"
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return f"at {address} through the proxy {found.hostname}:{found.port or 80}"  # without its credentials


def _describe_failure(error: Exception, own: Identity, name: str, address: str) -> str:
    """Reason of a failed connection, and what to do."""
    if isinstance(error, NoPinError):
        return f"no certificate of it is pinned; get its card and run: pdsl peer pin {own.folder} CARD"
    if isinstance(error, ssl.SSLCertVerificationError | NotPinnedError):
        return (
            f"its certificate is not the pinned one; ask {name} whether it renewed its key, then pin its new card:"
            f" pdsl peer pin {own.folder} CARD"
        )
    if isinstance(error, ssl.SSLError):
        return "does not speak TLS 1.3; check its address, and whether a proxy opens TLS connections"
    if isinstance(error, socket.gaierror):
        return f"the host in {address} has no address here; check the name and DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {address}; start it there (it waits and spends nothing), or check the port"
    if isinstance(error, TimeoutError):
        return f"no answer from {address}; a firewall drops the connection: open the port, or set https_proxy"
    if isinstance(error, ConnectionError) and error.args and isinstance(error.args[0], str):
        return f"{error.args[0]}; check that it runs, and that the proxy allows CONNECT to {address}"
    return f"cannot be reached ({getattr(error, 'strerror', None) or type(error).__name__}); check the network"
