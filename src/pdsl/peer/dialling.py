"""Peer without an address: it opens all connections itself, for its own requests and for those of its neighbours.

For each neighbour with an address it keeps a few connections open and reverses them. With a neighbour that has no
address either, it meets at a relay: the member that comes first in the plan calls, and the other one waits.
"""

import asyncio
import time
from functools import partial

from pdsl.peer.connections import ConnectionPool, Dial, NoPinError
from pdsl.peer.http1 import FAILED, HttpConnection, Stream
from pdsl.peer.identity import Identity
from pdsl.peer.messages import MAX_CONTROL, RefusedError, RelayRequest, Request
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.relay import READY
from pdsl.peer.routes import find_relays, has_address
from pdsl.peer.server import OK, Server
from pdsl.peer.state import ServerState
from pdsl.peer.trust_store import TrustStore

CONNECTIONS = 3  # kept open for the requests of a neighbour
RETRY_DELAY = 0.2  # seconds after a failure
DIAL_SECONDS = 20.0  # to open a connection, through a proxy or a relay
WAIT_SECONDS = 60.0  # at a relay, before a new connection replaces one that may be dead


class Dialler:
    """Connections that a peer opens for the requests of its neighbours."""

    def __init__(self, own: Identity, plan: TrainingPlan, trust_store: TrustStore):
        self._plan, self._me = plan, plan.agent(own.card.name)
        neighbours = plan.neighbours(self._me)
        relays = {r for j in neighbours for r in find_relays(plan, self._me, j)}
        self._relays = {r: ConnectionPool(own, plan.members[r], trust_store) for r in relays}
        self._tasks: list[asyncio.Task[None]] = []
        self._open: dict[int, set[HttpConnection]] = {j: set() for j in neighbours}  # for requests of a neighbour
        self.pools = {j: ConnectionPool(own, plan.members[j], trust_store, self._find_way(j)) for j in neighbours}

    def _find_way(self, j: int) -> Dial | None:
        return partial(self._call_relay, j) if self._calls(j) else None

    def _calls(self, j: int) -> bool:
        """Whether this peer calls neighbour j through a relay."""
        return self._me < j and bool(find_relays(self._plan, self._me, j))

    def start(self, server: Server, state: ServerState, listens: bool) -> None:
        """Accept reversed connections, and open some if this peer does not listen."""
        server.on_reverse = lambda j, connection: self.pools[j].adopt(connection)
        if listens:
            return
        for j, pool in self.pools.items():
            if has_address(self._plan, j) or self._calls(j):
                loops = [self._keep_reversed(j, pool, server) for _ in range(CONNECTIONS)]
                loops.append(self._renew_silent(j, state))
            else:
                relays = find_relays(self._plan, self._me, j)
                loops = [self._keep_waiting(j, r, server) for r in relays for _ in range(2)]
            self._tasks += [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in [*self.pools.values(), *self._relays.values()]:
            pool.stop()

    async def _keep_reversed(self, j: int, pool: ConnectionPool, server: Server) -> None:
        """Keep a connection open over which neighbour j sends requests."""
        while True:
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    connection = await pool.dial()
                    body = Request(self._plan.hash, 0, 0).encode()
                    response = await connection.request("/reverse", self._plan.members[j].name, body, MAX_CONTROL)
                if response.status == OK:
                    self._open[j].add(connection)
                    await server.serve(j, connection.reverse())
                    self._open[j].discard(connection)
                connection.close()
            except (*FAILED, NoPinError, RefusedError):
                pass
            await asyncio.sleep(RETRY_DELAY)

    async def _renew_silent(self, j: int, state: ServerState) -> None:
        """Close the connections for the requests of j if none arrives: a firewall may have dropped them silently."""
        while True:
            await asyncio.sleep(state.silence / 2)
            last = state.calls.get(j, (0.0, 0.0))[1]
            if time.monotonic() - last > state.silence / 2:
                for connection in self._open[j]:
                    connection.close()

    async def _keep_waiting(self, j: int, relay: int, server: Server) -> None:
        """Wait at a relay for connections of neighbour j, and serve them."""
        serving: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    async with asyncio.timeout(DIAL_SECONDS):
                        connection = await self._relays[relay].dial()
                    body = RelayRequest(self._plan.hash, j).encode()
                    name = self._plan.members[relay].name
                    async with asyncio.timeout(WAIT_SECONDS):
                        response = await connection.request("/listen", name, body, MAX_CONTROL)
                    if response.status == OK:
                        connection.writer.write(READY)
                        task = asyncio.create_task(_quietly(server, j, connection.stream))
                        serving.add(task)
                        task.add_done_callback(serving.discard)
                        continue
                    connection.close()
                except (*FAILED, NoPinError, RefusedError):
                    pass
                await asyncio.sleep(RETRY_DELAY)
        finally:
            for task in serving:
                task.cancel()

    async def _call_relay(self, j: int) -> Stream:
        """Stream to neighbour j through the first relay at which it waits."""
        body = RelayRequest(self._plan.hash, j).encode()
        for relay, pool in ((r, self._relays[r]) for r in find_relays(self._plan, self._me, j)):
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    connection = await pool.dial()
                    name = self._plan.members[relay].name
                    response = await connection.request("/connect", name, body, MAX_CONTROL)
            except (*FAILED, NoPinError, RefusedError):
                continue
            if response.status == OK:
                return connection.stream
            connection.close()
        raise ConnectionError("no relay has a connection to this member")


async def _quietly(server: Server, j: int, stream: Stream) -> None:
    try:
        await server.accept_relayed(j, stream)
    except FAILED:
        stream.writer.transport.abort()
