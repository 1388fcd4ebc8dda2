"""The server's side of the wire: who is asking, may it ask this, and what is the answer.

Who it is comes from the certificate alone. Every refusal has a name, is logged, and changes nothing.
"""

from collections import Counter
from typing import Any

from pdsl.errors import PdslError
from pdsl.peer import tls
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.node import Node
from pdsl.peer.pins import Pins
from pdsl.peer.plan import Plan
from pdsl.peer.wire import RefusedError, Request

SERVICE = "pdsl.Peer"


class Server:
    """Answers neighbours from a node's state."""

    def __init__(self, grpc: Any, own: Identity, plan: Plan, pins: Pins, node: Node, events: Events):
        self._grpc, self._own, self._plan, self._pins, self._node, self._events = grpc, own, plan, pins, node, events
        self._names = {plan.members[j].name: j for j in node.neighbours}
        self._open: Counter[int] = Counter()

    async def start(self, listen: str) -> int:
        """Listen; returns the port. Only the certificates pinned now can connect, only those pinned then can ask."""
        grpc = self._grpc
        pinned = [pem for name in self._names for pem in self._pins.of(name)]
        if not pinned:
            raise PdslError(f"no neighbour is pinned; accept one of them: pdsl peer pin {self._own.folder} CARD")
        self._server = tls.server(grpc, len(self._names))
        methods = {"Hello": self._hello, "Fetch": self._fetch}
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port: int = self._server.add_secure_port(listen, tls.server_credentials(grpc, self._own, pinned))
        except RuntimeError as e:
            raise PdslError(f"cannot listen on {listen}; is it in use? give another with --listen") from e
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(grace=0.2)

    async def _hello(self, content: bytes, context: Any) -> bytes:
        j, request = await self._admitted(content, context)
        try:
            return (await self._node.hello(j, request.round)).encode()
        finally:
            self._open[j] -= 1

    async def _fetch(self, content: bytes, context: Any) -> bytes:
        j, request = await self._admitted(content, context)
        try:
            return await self._node.fetch(j, request.round, request.phase)
        finally:
            self._open[j] -= 1

    async def _admitted(self, content: bytes, context: Any) -> tuple[int, Request]:
        """The agent that is asking and what it asks; whatever is wrong ends the call with the reason."""
        codes = self._grpc.StatusCode
        j = None
        try:
            j = self._caller(context)
            if self._open[j] >= tls.STREAMS:
                raise RefusedError("too many requests")
            request = Request.decode(content, self._plan.hash)
        except RefusedError as e:
            who = context.peer() if j is None else self._plan.members[j].name
            self._events.log("refused", what="request", of=who, reason=e.reason)
            code = codes.PERMISSION_DENIED if j is None else codes.INVALID_ARGUMENT
            await context.abort(code, e.reason)
            raise
        self._open[j] += 1
        return j, request

    def _caller(self, context: Any) -> int:
        """The neighbour whose pin, byte for byte, is the certificate of this connection."""
        auth = context.auth_context()
        if auth.get("ssl_tls_version") != [tls.VERSION]:
            raise RefusedError("not TLS 1.3")
        (shown,) = auth.get("x509_pem_cert") or [b""]
        for name, j in self._names.items():
            if shown.decode() in self._pins.of(name):
                return j
        raise RefusedError("certificate not pinned")
