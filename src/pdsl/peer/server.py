"""Server side of a peer: requests of identified neighbours and their answers.

A refused request is logged with a named reason and changes nothing. Pins are checked again at every request, and
connections of a revoked certificate are closed within a second. A neighbour has few connections, each with one request
at a time, and a limited rate of requests: a neighbour that sends more waits for itself only.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from pdsl.peer import about
from pdsl.peer.http1 import FAILED, Exchange, HttpConnection, Stream, TooLargeError
from pdsl.peer.identity import NO_ADDRESS, Identity
from pdsl.peer.limits import TokenBucket
from pdsl.peer.listener import Listener
from pdsl.peer.messages import MAX_CONTROL, NO_RECEIPT, RefusedError, Request
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.relay import Relay
from pdsl.peer.routes import find_contacts
from pdsl.peer.state import ServerState
from pdsl.peer.status import Events
from pdsl.peer.streams import start_tls
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError

MAX_CONNECTIONS = 8  # per neighbour
IDLE_SECONDS = 60.0  # after which a connection without requests is closed
REQUEST_RATE, REQUEST_BURST = 200.0, 400.0  # per second and neighbour
SWEEP_SECONDS = 1.0  # between checks for revoked certificates
PATHS = ("/hello", "/fetch", "/goodbye")
TAKEN_OVER = ("/reverse", "/listen", "/connect")  # after these, a connection carries something else
OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, TOO_LARGE = 200, 400, 403, 404, 413


class Server:
    """Server that admits pinned neighbours and answers from a ServerState."""

    def __init__(self, own: Identity, plan: TrainingPlan, trust_store: TrustStore, state: ServerState, events: Events):
        self._own, self._plan, self._state, self._events = own, plan, state, events
        me = plan.agent(own.card.name)
        self._names = {plan.members[j].name: j for j in find_contacts(plan, me)}
        self._relay = Relay(plan, me)
        self.on_reverse: Callable[[int, HttpConnection], None] = lambda j, connection: connection.close()
        self._trust_store = trust_store
        self._listener = Listener(own, trust_store, self._names, events, self.serve)
        self._connections: dict[int, list[HttpConnection]] = defaultdict(list)  # oldest first
        self._rates = {j: TokenBucket(REQUEST_RATE, REQUEST_BURST) for j in self._names.values()}
        self._taken_over: set[HttpConnection] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> int:
        """Start to listen, unless `listen` is none. Returns the port, or 0."""
        if not any(self._trust_store.certificates(name) for name in self._names):
            raise PdslError(f"no neighbour is pinned; pin at least one: pdsl peer pin {self._own.folder} CARD")
        port = 0 if listen == NO_ADDRESS else await self._listener.start(listen)
        self._sweeper = asyncio.create_task(self._sweep())
        return port

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._listener.stop()
        self._relay.close()
        for connections in self._connections.values():
            for connection in connections:
                connection.close()

    async def serve(self, j: int, connection: HttpConnection) -> None:
        """Serve a connection of neighbour j until either end closes it."""
        same = self._connections[j]
        same.append(connection)
        if len(same) > MAX_CONNECTIONS:
            same.pop(0).close()  # its own task ends with an error
        try:
            while (request := await self._receive(j, connection)) is not None:
                if request.path in TAKEN_OVER and self._is_pinned(j, connection.certificate):
                    if await self._take_over(j, connection, request):
                        continue
                    return
                status, body = await self._answer(j, connection.certificate, request)
                reusable = await connection.respond(status, body, self._plan.timeouts.deadline)
                if not reusable or status == FORBIDDEN:
                    break
        except FAILED:
            pass  # the neighbour calls again
        finally:
            if connection in same:
                same.remove(connection)
            if connection not in self._taken_over:
                connection.writer.close()
            self._taken_over.discard(connection)

    async def _take_over(self, j: int, connection: HttpConnection, request: Exchange) -> bool:
        """Reverse a connection, or relay it to another member. Returns whether it still answers requests."""
        try:
            if request.path != "/reverse":
                again = await self._relay.take(j, connection, request.path, request.body)
                if not again:
                    self._taken_over.add(connection)
                return again
            Request.decode(request.body, self._plan.accepts, self._plan.config.rounds)
            if j not in self._state.neighbours:
                raise RefusedError("not a neighbour")
        except RefusedError as e:
            self._refuse(j, e.reason)
            return await connection.respond(BAD_REQUEST, e.reason.encode(), self._plan.timeouts.deadline)
        self._taken_over.add(connection)
        await connection.respond(OK, b"", self._plan.timeouts.deadline)
        self.on_reverse(j, connection.reverse())
        return False

    async def accept_relayed(self, j: int, stream: Stream) -> None:
        """Serve neighbour j over a stream through a relay, with TLS between the two inside."""
        context = self._listener.current_context()
        pinned = self._trust_store.accepted(self._plan.members[j].name)
        await self.serve(j, await start_tls(stream, context, pinned, None))

    async def _receive(self, j: int, connection: HttpConnection) -> Exchange | None:
        await asyncio.sleep(self._rates[j].delay())
        try:
            return await connection.receive(MAX_CONTROL, IDLE_SECONDS)
        except TooLargeError as e:
            self._refuse(j, e.reason)
            await connection.respond(TOO_LARGE, e.reason.encode(), self._plan.timeouts.deadline)
            return None

    async def _answer(self, j: int, certificate: bytes, request: Exchange) -> tuple[int, bytes]:
        """Status and content of the response to a request."""
        try:
            if self._listener.identify(certificate) != j:
                raise RefusedError("certificate not pinned")
        except RefusedError as e:
            self._refuse(j, e.reason)
            return FORBIDDEN, e.reason.encode()
        if request.method == "POST" and request.path == about.PATH:
            return OK, self._describe(j).encode()
        if request.method != "POST" or request.path not in PATHS or j not in self._state.neighbours:
            return NOT_FOUND, b"path"
        try:
            asked = Request.decode(request.body, self._plan.accepts, self._plan.config.rounds)
        except RefusedError as e:
            self._refuse(j, e.reason)
            return BAD_REQUEST, e.reason.encode()
        self._state.receipts.check(j, asked.served)
        if request.path == "/goodbye":
            self._state.record_goodbye(j)
            self._events.log("goodbye", who=self._plan.members[j].name, round=self._state.round)
            return OK, b""
        if request.path == "/hello":
            return OK, (await self._state.hello(j, asked.round)).encode()
        return OK, await self._state.fetch(j, asked.round, asked.phase)

    def _describe(self, j: int) -> about.About:
        """Answer to a request of any version. Nothing about the caller is noted."""
        state = self._state
        served = state.receipts.held.get(j, NO_RECEIPT)
        return about.describe(self._plan.hash, state.round, j in state.neighbours and state.reaches(j), served)

    def _refuse(self, j: int, reason: str) -> None:
        self._events.log("refused", what="request", of=self._plan.members[j].name, reason=reason)

    async def _sweep(self) -> None:
        """Close connections whose certificate was revoked."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._relay.drop_unless(self._is_pinned)
            for j, connections in self._connections.items():
                for connection in list(connections):
                    if not self._is_pinned(j, connection.certificate):
                        self._refuse(j, "certificate not pinned")
                        connection.close()

    def _is_pinned(self, j: int, certificate: bytes) -> bool:
        try:
            return self._listener.identify(certificate) == j
        except RefusedError:
            return False
