"""The measurements behind `make bench`. Real MNIST, the paper's CNN with 16 and 32 channels, |Q| = 2,000, B = 250."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import literal
from benchmarks.speed.literal import LiteralRound
from pdsl.algorithms import PDSL
from pdsl.config import validate
from pdsl.gradients.clipping import clip_batch, clip_per_sample
from pdsl.privacy.discrete_gaussian import sample
from pdsl.settings import ShapleySettings
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import Trainer, build_trainer, initial_state
from pdsl.utils.inputs import channels_last
from pdsl.utils.random import SecretStreams, Streams
from pdsl.utils.workers import Workers

R = 20
B = 250
LITERALLY = {"value": "accuracy", "step_fraction": 1.0, "orders": "independent"}  # by the paper's letter
MATRIX = 1024  # side of the matrices whose product is the machine's peak
FORWARD = 2 * (9 * 16 * 784 + 9 * 16 * 32 * 196 + 32 * 49 * 10)  # operations on one image
GRADIENT = 3 * FORWARD - 2 * 9 * 16 * 784  # nobody asks for the derivative by the image

Work = Callable[[], object]
Say = Callable[[str], None]


def measure(repeats: int, say: Say) -> dict[str, Any]:
    """Every ratio; `say` is told what is being measured."""
    say("rounds against the literal algorithm")
    rounds = {
        "full20-fast": _round_vs_literal("full", 20, "fast", repeats),
        "full20-montecarlo": _round_vs_literal("full", 20, "montecarlo", min(repeats, 2)),
        "ring10-exact": _round_vs_literal("ring", 10, "exact", repeats),
    }
    say("kernels against the machine's matrix product")
    peak = _peak_fraction(repeats)
    say("two cores against one")
    with _fresh_process() as fresh:  # whose memory is as a run finds it, not as the measurements before have left it
        cores = fresh.submit(_two_cores, repeats).result()
    say("1,000 agents against 10")
    growth = _growth()
    say("clipping, import and noise")
    return {
        "round_vs_literal": {name: found[0] for name, found in rounds.items()},
        "round_vs_literal_on_all_cores": {name: found[1] for name, found in rounds.items()},
        "peak_fraction": peak,
        "two_cores": cores,
        "growth": growth,
        "per_sample_vs_batch_clipping": _clipping(repeats),
        "help_vs_torch": _start_up(repeats),
        "system_vs_seeded_noise": _noise(repeats),
    }


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(a: Work, b: Work, repeats: int) -> float:
    """How many times longer a takes than b: the median over turns of both."""
    a(), b()
    return statistics.median(seconds(a) / seconds(b) for _ in range(repeats))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mnist(graph: str, agents: int, shapley: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """PDSL on real MNIST under a total budget."""
    values: dict[str, Any] = {
        "rounds": 100,
        "data": {"name": "mnist", "validation": 2000},
        "model": {"name": "mnist-cnn", "channels": [16, 32], "norm": "none"},
        "graph": {"kind": graph, "agents": agents},
        "batch": {"size": B},
        "algorithm": {"gossip_steps": 1, "shapley": shapley or {"permutations": R} | LITERALLY},
        "privacy": {"target_epsilon": 1.0},
    }
    return prepare(validate(values | changes, "bench"))


def small_ring(agents: int, **changes: Any) -> Experiment:
    """The same work for every agent, however many there are: equal parts, a batch of 32, values on 50 records of Q."""
    small = {"batch": {"size": 32}, "partition": {"kind": "iid"}}
    return mnist("ring", agents, {"estimator": "exact", "sample": 50}, **small, **changes)


def _fresh_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _round_vs_literal(graph: str, agents: int, estimator: str, repeats: int) -> tuple[float, float]:
    """How many times longer the literal round takes, with one torch thread and with one per core.

    A round of ours: everything but the Shapley values as it is, and one agent's values times the agents.
    """
    e = mnist(graph, agents)
    count = LiteralRound.exact(e.graph) if estimator == "exact" else LiteralRound.monte_carlo(e.graph, R)
    settings = ShapleySettings.model_validate({"estimator": estimator, "permutations": R} | LITERALLY)
    batch = e.data.x[e.parts[0][:B]], e.data.y[e.parts[0][:B]]
    ratios = []
    with Workers() as workers, _fresh_process() as plain:
        parts = build_trainer(e, workers)
        without_values = PDSL(gossip_steps=1, shapley=ShapleySettings(weighting="uniform"))
        state, _ = without_values.step(initial_state(e), parts.round(1))
        candidates = _candidates(parts, state.x)
        for t in range(2, 2 + max(1, repeats)):
            literals = []
            for n in (1, os.cpu_count() or 1):
                timed = plain.submit(_literal_seconds, state.x[0], e.validation, batch, n).result()
                literals.append(count.seconds(*timed))
            rest = seconds(partial(without_values.step, state, parts.round(t)))
            game = t, range(1), state.x[:1], [candidates], settings
            values = seconds(partial(parts.validation.contributions, *game))
            ours = rest + e.graph.agents * values
            ratios.append([literally / ours for literally in literals])
    one, all_cores = (statistics.median(column) for column in zip(*ratios, strict=True))
    return one, all_cores


def _literal_seconds(
    x: Tensor, public: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor], n: int
) -> tuple[float, float]:
    """An evaluation and a gradient in plain torch on n threads; in a process whose memory nobody has tuned."""
    network = literal.plain_mnist_cnn()
    with threads(n):
        literal.gradient(network, x, batch[0][:50], batch[1][:50])  # a first call sets up what later ones find there
        evaluation = seconds(lambda: literal.evaluate(network, x, *public))
        return evaluation, seconds(lambda: literal.gradient(network, x, *batch))


def _candidates(parts: Trainer, x: Tensor) -> Tensor:
    """Agent 0's models x_{0,j} of a real round, noise and all."""
    at = next(parts.round(2).cross_gradients(x))
    return x[0] - at.split_by_agent(at.values)[0]


def _peak_fraction(repeats: int) -> dict[str, float]:
    """Operations per second of our kernels over those of a large matrix product, one thread each."""
    e = mnist("ring", 10)
    a, b = torch.randn(2, MATRIX, MATRIX, generator=torch.Generator().manual_seed(0))
    x, n = e.network.initial_parameters(), len(e.validation[1])
    with Workers(1) as workers:
        local = build_trainer(e, workers).local
        inputs, labels = channels_last(e.data.x[:B]), e.data.y[:B]
        kernels: dict[str, tuple[Work, float]] = {
            "forward": (lambda: e.network.outputs(x, e.validation[0]), n * FORWARD),
            "gradient": (
                lambda: clip_per_sample(e.network, x, inputs, labels, 1.0, B, local.kernel),
                B * GRADIENT,
            ),
        }
        product = 2 * MATRIX**3
        return {
            name: ratio(lambda: a @ b, kernel, max(repeats, 5)) * operations / product
            for name, (kernel, operations) in kernels.items()
        }


def _two_cores(repeats: int) -> float:
    """A whole PDSL round on a ring of 10 by one worker over the same by one per core."""
    e = mnist("ring", 10, shapley={"estimator": "exact", "sample": 500})
    step = e.config.algorithm.step
    with Workers(1) as one, Workers() as all_of_them:
        alone, together = build_trainer(e, one), build_trainer(e, all_of_them)
        state, _ = step(initial_state(e), together.round(1))
        return ratio(lambda: step(state, alone.round(2)), lambda: step(state, together.round(2)), max(repeats, 15))


def _growth() -> float:
    """Time per agent of a PDSL round on a ring of 1,000, over that on a ring of 10."""
    few, many = (_seconds_per_agent(agents, rounds) for agents, rounds in ((10, 40), (1000, 2)))
    return many / few


def _seconds_per_agent(agents: int, rounds: int) -> float:
    e = small_ring(agents)
    step = e.config.algorithm.step
    with Workers() as workers:
        parts = build_trainer(e, workers)
        state, _ = step(initial_state(e), parts.round(1))
        times = [seconds(partial(step, state, parts.round(t))) for t in range(2, 2 + rounds)]
    return statistics.median(times) / agents


def _clipping(repeats: int) -> float:
    """A gradient with every record clipped, over one clipped as a batch."""
    e = mnist("ring", 10)
    x, inputs, labels = e.network.initial_parameters(), channels_last(e.data.x[:B]), e.data.y[:B]
    with Workers(1) as workers:
        way = build_trainer(e, workers).local.kernel
        return ratio(
            lambda: clip_per_sample(e.network, x, inputs, labels, 1.0, B, way),
            lambda: clip_batch(e.network, x, inputs, labels, 1.0, B),
            max(repeats, 5),
        )


def _start_up(repeats: int) -> float:
    """Time of `pdsl --help` over `import torch`, each in a new process."""

    def start(*arguments: str) -> Work:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    return ratio(start("-m", "pdsl", "--help"), start("-c", "import torch"), repeats)


def _noise(repeats: int) -> float:
    """One message's noise from the operating system's entropy, over seeded noise."""
    d, k = 20_490, 2**24

    def drawn(streams: Streams) -> Work:
        return lambda: sample(d, k, streams.bits("noise", 0, 1, 2))

    return ratio(drawn(SecretStreams(0)), drawn(Streams(0)), max(repeats, 5))
