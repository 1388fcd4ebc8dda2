"""A peer of the simulation: `pdsl.peer.runner` with a tiny training step, on the simulated network and disk.

The round loop, ledger, noise log, receipts, checkpoints, client, server and engine are the real ones. Replaced are the
parts that read data and build models, the connections, and the threads.
"""

import asyncio
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pdsl.config import validate
from pdsl.peer import experiment, noise_log, progress, runner
from pdsl.peer.amendment import Amendment
from pdsl.peer.calls import Calls
from pdsl.peer.client import Client
from pdsl.peer.history import History
from pdsl.peer.http1 import Exchange
from pdsl.peer.identity import Identity
from pdsl.peer.ledger_file import open_directory
from pdsl.peer.noise_log import LoggedNoise
from pdsl.peer.plan import TaskDescription, Timeouts, TrainingPlan
from pdsl.peer.stages import Chain
from pdsl.peer.status import Events
from pdsl.peer.transport import Transport
from pdsl.privacy import Mechanism
from pdsl.utils.errors import PdslError
from pdsl.utils.random import SecretStreams
from tests.stress.world import Network, Pool, Process

D = 2  # numbers in a vector
SIGMA, SENSITIVITY, RATE = 0.05, 1 / 64, 0.1
TIMEOUTS = Timeouts(silence=1.5, patience=0.4, deadline=4.0, start=6.0)
NAMES = ("ada", "ben", "cleo", "dora")


@cache
def _identities() -> list[Identity]:
    with tempfile.TemporaryDirectory() as folder:
        return [Identity.create(Path(folder) / name, name, f"{name}.example:7443") for name in NAMES]


@cache
def make_plan(kind: str, peers: int, rounds: int) -> tuple[TrainingPlan, list[Identity]]:
    members = _identities()[:peers]
    values = {
        "rounds": rounds,
        "evaluate_every": 1000,
        "graph": {"kind": kind, "agents": peers},
        "model": {"name": "softmax"},
        "privacy": {"randomness": "system", "noise_multiplier": 1.0, "target_epsilon": 100.0},
    }
    task = TaskDescription(records=100, shape=(1,), classes=2, public_records=4, public="0" * 64)
    return TrainingPlan(validate(values, "simulation"), task, TIMEOUTS, tuple(m.card for m in members)), members


def make_chain(plan: TrainingPlan, members: list[Identity], first_round: int) -> Chain:
    """The plan, and an amendment by which the last member leaves before a round; without one if the round is 0."""
    if first_round == 0:
        return Chain(plan)
    leaver = members[-1]
    leaving = Amendment(plan.hash, 1, plan.hash, first_round, "leave", leaver.card.name)
    return Chain(plan, [leaving.sign(leaver)])


def write_folder(folder: Path, plan: TrainingPlan) -> None:
    """Folder of an organisation before its first start."""
    (folder / "run" / "checkpoint").mkdir(parents=True)
    (folder / "run" / "config.toml").write_text("simulated = true\n")


@cache
def mechanism(degree: int) -> Mechanism:
    return Mechanism(SIGMA, SENSITIVITY, messages=degree + 1, rate=RATE, dimension=D)


def _mechanisms(plan: TrainingPlan) -> list[Mechanism]:
    return [mechanism(len(plan.neighbours(i))) for i in range(len(plan.members))]


class _Workers:
    """One worker: the calling greenlet."""

    count = 1

    def map(self, function: Callable[[Any], Any], items: Any) -> list[Any]:
        return [function(item) for item in items]

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class _State:
    x: Tensor  # [1, d]


class _Listener:
    """Callers of the simulated network are known by number."""

    def identify(self, certificate: bytes) -> int:
        return int(certificate)

    async def stop(self) -> None:
        pass


class _History(History):
    """History in the memory of the simulation, which survives all crashes."""

    def __init__(self, process: Process, lines: list[dict[str, Any]]):
        super().__init__(Path("unused"))
        self._process, self._lines = process, lines

    def _write(self, values: dict[str, Any]) -> None:
        if not self._process.dead:
            self._lines.append(json.loads(json.dumps(values)))


class _Transport(Transport):
    """The real client and server of a peer, connected by the simulated network."""

    def __init__(self, loop: Any, own: Identity, plan: TrainingPlan, events: Any, d: int):
        super().__init__(loop, own, plan, events, d)
        self.process, self.network = loop, loop.network
        pools = {j: Pool(self.network, loop, j) for j in plan.neighbours(self.me)}
        self.calls = Calls(own, plan, pools, self.state, events, d)  # type: ignore[arg-type]
        self.client = Client(self.calls, self.me, plan, self.state, events, d)
        self.history = _History(loop, loop.lines)
        self.state.on_send, self.client.on_receive = self.history.send, self.history.receive
        self._server._listener = _Listener()  # type: ignore[assignment]

    def start(self, listen: str | None = None) -> int:
        async def start() -> None:
            self.network.servers[self.me] = self.process, self._serve
            self.calls.start()

        self.history.start(self.me, self._plan.hash)
        self._loop.run(start())
        return 0

    async def _serve(self, j: int, request: Exchange) -> tuple[int, bytes]:
        return await self._server._answer(j, b"%d" % j, request)

    def stop(self) -> None:
        self._loop.run(self.calls.stop())


class _Trainers:
    """Stand-in for `Trainers`: a round is the generation, the engine and the real noise."""

    def __init__(self, e: Any, plan: TrainingPlan, me: int, number: int, on_release: Any):
        self._e, self._me, self._on_release = e, me, on_release

    def get(self, generation: noise_log.Generation, workers: Any) -> Any:
        number, key, log = generation

        def on_release(t: int, digests: dict[noise_log.Draw, str]) -> None:
            self._on_release(number, t, digests)

        streams = SecretStreams(0, key, f"{self._me}/{number}".encode())
        noise = LoggedNoise(self._e.sigma, streams, workers, log, on_release)
        return SimpleNamespace(round=lambda t, declared: SimpleNamespace(t=t, noise=noise, key=key, e=self._e))


def _train(config: Any, state: _State, r: Any) -> tuple[_State, dict[str, Any]]:
    """One step: gradients of a quadratic at the neighbours' models, with noise; then one mixing of models."""
    e, t = r.e, r.t
    if e.pause:
        e.wait(e.pause)
    batch = int.from_bytes(hashlib.sha256(r.key + bytes([t])).digest()[:2], "big") / 65536

    def reply(makers: Tensor, peers: Tensor, rows: Tensor) -> Tensor:
        return r.noise.add(t, makers, peers, rows - e.target - batch)

    (replies,) = e.engine.request(state.x, reply)
    x = e.engine.mix(state.x - 0.3 * replies.values.mean(0, keepdim=True))
    return _State(x), {}


class Simulated:
    """One process of a peer, from its start to its end."""

    expected = PdslError

    def __init__(
        self,
        own: Identity,
        chain: Chain,
        process: Process,
        network: Network,
        lines: list[dict[str, Any]],
        folder: Path,
        pause: float,
    ):
        self._own, self._chain, self._process = replace(own, folder=folder), chain, process
        process.network, process.lines, process.pause = network, lines, pause  # type: ignore[attr-defined]
        self._peer: Any = None

    def train(self) -> float:
        """Run the real round loop. Returns ε."""
        span = self._chain.find_span(self._own.card)
        directory = open_directory(self._own, self._chain.newest)
        events = Events(directory.path / "events.jsonl")
        stage = self._chain.at(span.clamp(progress.find_next_round(directory)))
        self._peer = runner._PeerRun.__new__(runner._PeerRun)  # known before a crash in its constructor
        self._peer.__init__(self._own, stage, self._process, directory, events)
        outcome: Any = self._peer
        while isinstance(outcome, runner._PeerRun):
            self._peer = outcome
            outcome = outcome.train(None, lambda row: None)
        found: float = outcome["epsilon"]
        return found

    def release_files(self) -> None:
        """Close the files that the operating system closes when a process crashes."""
        if self._process.dead and hasattr(self._peer, "generations"):
            self._peer.generations.close()


def _build_experiment(
    own: Identity, plan: TrainingPlan, network: Any, key: bytes, number: int, mechanism: Mechanism, engine: Any
) -> Any:
    built = engine(plan.graph)
    process = built._transport.process
    agents = len(plan.members)
    return SimpleNamespace(
        engine=built,
        sigma=[SIGMA] * agents,
        sigma_scale=[{} for _ in range(agents)],
        target=float(plan.agent(own.card.name)),
        pause=process.pause,
        wait=lambda seconds: process.run(asyncio.sleep(seconds)),
    )


def _finish(peer: Any) -> dict[str, Any]:
    p = peer.progress
    if p.state is None or not p.rows:
        raise PdslError("no round was run: the budget or the neighbours did not allow one")
    return {"epsilon": p.ledger.epsilon}


@contextmanager
def installed(rng: random.Random) -> Iterator[None]:
    """Replace the parts of the round loop that a simulation cannot run."""
    network = SimpleNamespace(num_parameters=D)
    replaced = {
        "Transport": _Transport,
        "Trainers": _Trainers,
        "Workers": lambda count: _Workers(),
        "StatusWriter": lambda *arguments: SimpleNamespace(stop=lambda: None),
        "load_data": lambda own, plan: (None, None, SimpleNamespace(y=None)),
        "build_network": lambda *arguments: network,
        "build_experiment": _build_experiment,
        "check_records": lambda *arguments: None,
        "pin_stage": lambda *arguments: None,
        "run_round": _train,
        "keep_sums": lambda config, before, after, lost: after,
        "make_state": lambda config, x: _State(x),
        "state_tensors": lambda state: {"x": state.x},
    }
    loaded = {
        "initial_state": lambda e: _State(torch.zeros(1, D)),
        "restore_state": lambda config, tensors: _State(tensors["x"]),
        "carry_over": lambda config, state, before, me, graph: state,
    }
    secrets = SimpleNamespace(token_bytes=rng.randbytes)
    with (
        mock.patch.multiple(runner, **replaced),
        mock.patch.multiple(progress, **loaded),
        mock.patch.object(experiment, "agreed_mechanisms", _mechanisms),
        mock.patch.multiple(runner._PeerRun, _finish=_finish, _write_setup=lambda peer: None),
        mock.patch.object(noise_log, "secrets", secrets),
    ):
        yield
