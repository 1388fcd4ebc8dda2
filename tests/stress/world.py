"""A simulated world for peers: one clock, an event loop without sockets, a network and disks that forget.

Everything runs in one thread. The clock moves only when nothing is left to do at the present time, so a second costs
nothing, and a seed determines the whole course. The blocking code of a peer runs in a greenlet: when it waits for the
network, the event loop continues.
"""

import asyncio
import contextvars
import os
import random
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet

from pdsl.peer.http1 import FAILED, Exchange, Response

TICK = 1e-6  # seconds of one iteration of the event loop: on a clock that stands still, a poll would never end
MAX_ITERATIONS = 100_000  # of a schedule
MAX_CANCELLATIONS = 5  # of a task at the end of a schedule
START = 1000.0  # seconds on the clock when a world begins; 0 means "never" in the protocol


class CrashError(BaseException):
    """The process ends here, without any clean-up."""


class StuckError(Exception):
    """No timer and no callback is left, and a peer has not ended."""


class World(asyncio.BaseEventLoop):
    """Event loop whose time is simulated. Counts its iterations, in which a process can be made to crash."""

    def __init__(self, rng: random.Random):
        self.now, self.iteration, self.rng = START, 0, rng
        super().__init__()
        self._selector = self
        self.tasks = 0  # number of tasks so far
        self.errors: list[str] = []  # exceptions that no code handled
        self.on_iteration: Callable[[int], None] = lambda n: None
        self.set_exception_handler(_handle_error)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        """Move the clock to the next timer. asyncio calls this once per iteration."""
        self.iteration += 1
        self.now += TICK
        self.on_iteration(self.iteration)
        if self._ready:
            return []
        if timeout is None:
            raise StuckError
        self.now += max(timeout, 0.0)
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Let all clocks of this process be the simulated one."""
        real = time.monotonic, time.time
        time.monotonic, time.time = self.time, self.time  # type: ignore[assignment]
        asyncio.events._set_running_loop(self)
        try:
            yield
        finally:
            asyncio.events._set_running_loop(None)
            time.monotonic, time.time = real  # type: ignore[assignment]

    def run_until(self, done: Callable[[], bool], limit: float) -> bool:
        """Run until `done`; False if that takes more than `limit` simulated seconds, or never happens."""
        asyncio.events._set_running_loop(self)
        try:
            while not done():
                if self.now - START > limit or self.iteration > MAX_ITERATIONS:
                    return False
                self._run_once()
        except StuckError:
            return False
        return True

    def end_tasks(self) -> None:
        """Cancel all tasks, let them end, and close the loop.

        A task that is left would be finalised in a later schedule, on another loop.
        """
        for _ in range(MAX_CANCELLATIONS):
            while self._ready:
                self._run_once()
            if not (left := asyncio.all_tasks(self)):
                break
            for task in left:
                task.cancel()
        self.errors += [f"cannot be cancelled: {task.get_coro()!r}" for task in asyncio.all_tasks(self)]
        asyncio.events._set_running_loop(None)
        self.close()


def _handle_error(world: Any, context: dict[str, Any]) -> None:
    """Keep a fault of the program. As in `transport.Loop`, failures of connections are none."""
    if not isinstance(context.get("exception"), FAILED):
        world.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


OWNER: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("owner", default=None)


class _Task(asyncio.Task[Any]):
    """Task whose hash is its number in the world, so that sets of tasks have the same order in every process."""

    def __init__(self, *arguments: Any, loop: World, **options: Any):
        self._number = loop.tasks = loop.tasks + 1
        super().__init__(*arguments, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    task = _Task(coroutine, loop=loop, **options)
    context = options.get("context")
    if (owner := OWNER.get() if context is None else context.get(OWNER)) is not None:
        owner.tasks[task] = None
        task.add_done_callback(lambda task: owner.tasks.pop(task, None))
    return task


class Process:
    """A process of a peer: a greenlet for its blocking code, and tasks on the event loop. It can crash at any step."""

    def __init__(self, world: World, agent: int, target: Callable[["Process"], None], crash_at: int | None = None):
        self.world, self.agent, self.crash_at = world, agent, crash_at
        self.steps = 0  # of the blocking code: writes to disk, and waits for the network
        self.dead = False  # crashed
        self.died_in_step = False
        self.ended = False
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their start
        self._target = target
        self._greenlet: Any = None
        self._interrupt: BaseException | None = None
        self._awaited: asyncio.Task[Any] | None = None
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)

    def start(self) -> None:
        self._greenlet = greenlet(self._main, parent=getcurrent())
        self._greenlet.gr_context = self.context
        self._greenlet.switch()

    def _main(self) -> None:
        try:
            self._target(self)
        except CrashError:
            pass
        finally:
            self.ended = True

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop and wait for it, as `transport.Loop` does."""
        try:
            self.step()
        except CrashError:
            coroutine.close()
            raise
        self._awaited = task = self.world.create_task(coroutine)
        task.add_done_callback(self._resume)
        self._greenlet.parent.switch()
        self._awaited = None
        self._raise_interrupt(task)
        _mark_retrieved(task)  # also if the process crashes in this step
        self.step()
        return task.result()

    def _resume(self, task: "asyncio.Task[Any]") -> None:
        if task is self._awaited and not self.dead:
            self._greenlet.switch()

    def _raise_interrupt(self, task: "asyncio.Task[Any]") -> None:
        if self.dead:
            raise CrashError
        if (interrupt := self._interrupt) is not None:
            self._interrupt = None
            self._cancel(task)
            raise interrupt

    def step(self) -> None:
        """A point at which the process may crash."""
        if self.dead:
            raise CrashError
        self.steps += 1
        if self.steps == self.crash_at:
            self.died_in_step = True
            self._die()
            raise CrashError

    @property
    def is_running(self) -> bool:
        """Whether its blocking code runs at this moment."""
        return self._greenlet is not None and getcurrent() is self._greenlet

    def kill(self) -> None:
        """Crash now, from outside."""
        if not self.dead and not self.ended:
            self._die()
            if not self.is_running:
                self._greenlet.switch()  # raises CrashError there

    def interrupt(self, reason: BaseException) -> None:
        """Raise an exception in the blocking code, as a signal handler does."""
        if not self.dead and not self.ended and not self.is_running:
            self._interrupt = reason
            self._greenlet.switch()

    def _die(self) -> None:
        self.dead = True
        for task in list(self.tasks):
            self._cancel(task)

    def _cancel(self, task: "asyncio.Task[Any]") -> None:
        if task.cancel():
            task.add_done_callback(self._check_cancelled)
        else:
            _mark_retrieved(task)

    def _check_cancelled(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            self.world.errors.append(f"continued after its cancellation: {task.get_coro().__qualname__}")
            _mark_retrieved(task)


def _mark_retrieved(task: "asyncio.Task[Any]") -> None:
    """Mark the exception of an ended task as retrieved, or asyncio reports it whenever the task is collected."""
    if not task.cancelled():
        task.exception()


Serve = Callable[[int, Exchange], Coroutine[Any, Any, tuple[int, bytes]]]


class Cut(NamedTuple):
    """A cut between two sides of the network, from `start` to `end`."""

    side: frozenset[int]
    start: float  # seconds after the start of the world
    end: float
    one_way: bool = False  # only what leaves the side is lost

    def separates(self, a: int, b: int) -> bool:
        return (a in self.side) != (b in self.side) and (a in self.side or not self.one_way)


class Network:
    """Requests between peers, with delays, resets, repeated deliveries and cut lines."""

    def __init__(self, world: World, loss: float, repeat: float, slowest: float):
        self._world, self._loss, self._repeat, self._slowest = world, loss, repeat, slowest
        self.servers: dict[int, tuple[Process, Serve]] = {}
        self.cuts: list[Cut] = []
        self.unplugged: set[int] = set()  # machines that are off: they do not even reset connections

    def _delay(self) -> float:
        rng = self._world.rng
        return rng.uniform(0.001, 0.02) if rng.random() < 0.9 else rng.uniform(0.0, self._slowest)

    def is_cut(self, a: int, b: int) -> bool:
        """Whether nothing gets from a to b at this moment."""
        at = self._world.now - START
        return any(cut.start <= at < cut.end and cut.separates(a, b) for cut in self.cuts)

    def send(self, sender: Process, to: int, path: str, body: bytes, answer: "asyncio.Future[Response]") -> None:
        """Deliver a request. The answer comes later, or a reset, or nothing."""
        rng = self._world.rng
        self._world.call_later(self._delay(), self._deliver, sender, to, path, body, answer)
        if rng.random() < self._repeat:
            self._world.call_later(self._delay() * 10, self._deliver, sender, to, path, body, None)

    def _deliver(self, sender: Process, to: int, path: str, body: bytes, answer: Any) -> None:
        if self.is_cut(sender.agent, to) or to in self.unplugged:
            return
        process, serve = self.servers.get(to, (None, None))
        lost = self._world.rng.random() < self._loss
        if process is None or serve is None or process.dead or process.ended or lost:
            self._reset(sender, answer)
            return
        request = self._serve(process, serve, sender, path, body, answer)
        self._world.create_task(request, context=process.context.copy())

    async def _serve(
        self, process: Process, serve: Serve, sender: Process, path: str, body: bytes, answer: Any
    ) -> None:
        status, content = await serve(sender.agent, Exchange("POST", path, body))
        if self.is_cut(process.agent, sender.agent) or process.dead:
            return
        if self._world.rng.random() < self._loss:
            self._reset(sender, answer)
        else:
            self._world.call_later(self._delay(), self._answer, sender, answer, Response(status, content))

    def _reset(self, sender: Process, answer: Any) -> None:
        self._world.call_later(self._delay(), self._answer, sender, answer, ConnectionResetError("simulated"))

    def _answer(self, sender: Process, answer: Any, result: Response | Exception) -> None:
        if answer is None or answer.done() or sender.dead:
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


class Pool:
    """Stand-in for `ConnectionPool`: requests go over the simulated network."""

    def __init__(self, network: Network, process: Process, to: int):
        self._network, self._process, self._to = network, process, to
        self._busy: dict[asyncio.Future[Response], None] = {}
        self._stopped = False

    async def request(self, path: str, body: bytes, max_body: int) -> Response:
        if self._stopped:
            raise ConnectionError("stopped")
        answer: asyncio.Future[Response] = self._process.world.create_future()
        self._busy[answer] = None
        self._network.send(self._process, self._to, path, body, answer)
        try:
            return await answer
        finally:
            self._busy.pop(answer, None)

    def close(self) -> None:
        for answer in list(self._busy):
            if not answer.done():
                answer.set_exception(ConnectionAbortedError("closed"))

    def stop(self) -> None:
        self._stopped = True
        self.close()


class Disk:
    """Disk of a peer: it knows what is durable, and loses the rest in a power failure."""

    def __init__(self, folder: Path, rng: random.Random):
        self.folder, self._rng = folder, rng
        self._content: dict[int, bytes] = {}  # durable content by inode
        self._names: dict[str, dict[str, int]] = {}  # folder → name → inode, durable
        self.settle()

    def settle(self) -> None:
        """Make everything durable."""
        self._names = {at: {name: path.stat().st_ino for name, path in _files(at)} for at in self._folders()}
        self._content = {
            path.stat().st_ino: path.read_bytes() for at in self._folders() for _, path in _files(at)
        }  # fmt: skip

    def _folders(self) -> list[str]:
        return [str(self.folder), *(str(path) for path in sorted(self.folder.rglob("*")) if path.is_dir())]

    def sync(self, file: int) -> None:
        """Note an fsync of an open file or folder."""
        at, status = str(Path(f"/proc/self/fd/{file}").readlink()), os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            self._names[at] = {entry.name: entry.inode() for entry in os.scandir(at) if entry.is_file()}
        else:
            self._content[status.st_ino] = Path(at).read_bytes()

    def lose_power(self) -> None:
        """Undo changes that were not synced: each one may or may not have reached the disk."""
        for at in self._folders():
            now = {name: path.stat().st_ino for name, path in _files(at)}
            before = self._names.get(at, {})
            for name in sorted({*now, *before}):
                self._choose(Path(at) / name, now.get(name), before.get(name))
        self.settle()

    def _choose(self, path: Path, now: int | None, before: int | None) -> None:
        inode = now if now == before or self._rng.random() < 0.5 else before
        if inode is None:
            path.unlink(missing_ok=True)
            return
        durable = self._content.get(inode, b"")
        current = path.read_bytes() if inode == now else durable
        if current.startswith(durable) and self._rng.random() < 0.5:  # some of the appended bytes reached the disk
            durable = current[: self._rng.randint(len(durable), len(current))]
        if inode != now or durable != current:
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
            path.unlink(missing_ok=True)
            path.write_bytes(durable)
            path.chmod(mode)


def _files(at: str) -> list[tuple[str, Path]]:
    return [(path.name, path) for path in sorted(Path(at).iterdir()) if path.is_file()]
