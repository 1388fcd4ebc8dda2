"""Blocking interface to the network for one peer. The event loop runs in its own thread."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from pdsl.peer.attendance import RollCallResult
from pdsl.peer.calls import Calls
from pdsl.peer.client import Client
from pdsl.peer.dialling import Dialler
from pdsl.peer.history import FILE as HISTORY
from pdsl.peer.history import History
from pdsl.peer.http1 import FAILED
from pdsl.peer.identity import NO_ADDRESS, PINS, RUN, Identity
from pdsl.peer.messages import MODEL_PHASE, Header, encode
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.receipts import FILE as RECEIPTS
from pdsl.peer.receipts import Receipts
from pdsl.peer.server import Server
from pdsl.peer.state import ServerState
from pdsl.peer.status import Events, NeighbourStatus
from pdsl.peer.trust_store import TrustStore

T = TypeVar("T")


class Loop:
    """An event loop in a thread, which several peers in one process can share."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle_error)
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdsl peer", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. An interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


def _handle_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report a fault of the program. Failures of connections are not reported here, because callers can cause them."""
    if not isinstance(context.get("exception"), FAILED):
        loop.default_exception_handler(context)


class Transport:
    """Server and client of one peer."""

    def __init__(self, loop: Loop, own: Identity, plan: TrainingPlan, events: Events, d: int):
        self._loop, self._own, self._plan = loop, own, plan
        self.me = plan.agent(own.card.name)
        trust_store = TrustStore(own.folder / PINS)
        patience = plan.timeouts.patience
        poll = min(1.0, plan.timeouts.silence / 8, patience / 4)
        neighbours = plan.neighbours(self.me)
        self.receipts = Receipts(own.key, plan.original_hash, neighbours, own.folder / RUN / RECEIPTS)
        self.state = ServerState(plan.hash, neighbours, self.receipts, poll, patience, plan.timeouts.silence)
        self._server = Server(own, plan, trust_store, self.state, events)
        self._dialler = Dialler(own, plan, trust_store)
        self.calls = Calls(own, plan, self._dialler.pools, self.state, events, d)
        self.client = Client(self.calls, self.me, plan, self.state, events, d)
        self.history = History(own.folder / RUN / HISTORY)
        self.state.on_send, self.client.on_receive = self.history.send, self.history.receive

    def start(self, listen: str | None = None) -> int:
        """Listen on an address, by default the card's, and connect. Returns the port.

        With the address none, all connections are opened by this peer.
        """

        async def start() -> int:
            self.state.last_contact = dict.fromkeys(self.state.neighbours, time.monotonic())
            address = listen or self._own.card.address
            port = await self._server.start(address)
            self._dialler.start(self._server, self.state, listens=address != NO_ADDRESS)
            self.calls.start()
            return port

        self.history.start(self.me, self._plan.hash)
        return self._loop.run(start())

    def stop(self) -> None:
        async def stop() -> None:
            await self.calls.stop()
            await self._dialler.stop()
            await self._server.stop()
            self.history.close()

        self._loop.run(stop())

    def roll_call(self, t: int) -> RollCallResult:
        return self._loop.run(self.client.roll_call(t))

    def exchange(self, t: int, phase: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send each neighbour its row of a phase and receive one from each.

        A neighbour without an entry in the result is excluded from the round.
        """
        hash_ = self._plan.hash
        messages = {j: encode(Header(hash_, t, phase, sender=self.me, receiver=j), row) for j, row in rows.items()}
        return self._loop.run(self.client.exchange(t, phase, messages))

    def note_release(self, t: int) -> None:
        """Note that noisy vectors of round t can leave, for the receipts of neighbours."""
        self.receipts.note_release(t)

    def record_vectors(self, generation: int, t: int, digests: Mapping[tuple[int, int, int, int], str]) -> None:
        """Record the noisy vectors of one local step of round t, before they can leave."""
        self.history.make(generation, t, digests)
        self.note_release(t)

    def publish_model(self, x: Tensor) -> None:
        """Offer a model to neighbours that return without a checkpoint."""
        self.state.model = encode(Header(self._plan.hash, 0, MODEL_PHASE, sender=self.me, receiver=self.me), x)

    def leave_round(self) -> None:
        """Stop all exchanges of this round."""

        async def leave() -> None:
            self.state.begin_round(())

        self._loop.run(leave())

    def fetch_models(self) -> list[Tensor]:
        return self._loop.run(self.client.fetch_models())

    def finish(self) -> None:
        """After the last round, let neighbours fetch their messages, then report the state "finished"."""

        async def finish() -> None:
            await self.client.drain()
            self.state.finish()

        self._loop.run(finish())

    def end_stage(self) -> None:
        """Before an amendment comes into force, let neighbours fetch their messages."""
        self._loop.run(self.client.drain())

    @contextmanager
    def goodbye_on_interrupt(self) -> Iterator[None]:
        """Say goodbye to the neighbours if the run is interrupted, so that they do not wait for this peer."""
        try:
            yield
        except KeyboardInterrupt:
            self.say_goodbye()
            raise

    def say_goodbye(self) -> None:
        """Tell all neighbours that this peer ends now."""

        async def say() -> None:
            await self._server.stop()  # an answer after the goodbye would revoke it
            await self.calls.say_goodbye()

        self._loop.run(say())

    def describe_delays(self, seconds: float) -> list[str]:
        """Name the neighbours that were late by more than a deadline or a tenth of `seconds`, the length of the run."""
        limit = max(1.0, min(self._plan.timeouts.deadline, seconds / 10))
        return [
            f"{name} delivered {late:.0f} s later than most neighbours in total"
            for name, late in self.waited_for().items()
            if late > limit
        ]

    def waited_for(self) -> dict[str, float]:
        """Seconds by which each neighbour was later than most, over all rounds."""
        total = self.client.delays.total
        return {neighbour.name: round(total[j], 1) for j, neighbour in self.client.neighbours.items()}

    def neighbour_statuses(self) -> list[NeighbourStatus]:
        state, now = self.state, time.monotonic()
        return [
            NeighbourStatus(
                name=neighbour.name,
                state=neighbour.state,
                in_round=j in state.present,
                round=max(neighbour.at[0], state.last_request[j]),  # from its answers and its requests
                heard_seconds_ago=round(now - max(state.last_contact[j], state.calls.get(j, (0.0, 0.0))[1]), 1),
            )
            for j, neighbour in self.client.neighbours.items()
        ]
