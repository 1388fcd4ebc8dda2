"""Learning-rate schedules: values against PyTorch's; algorithms against their rules, written out with a γ per round."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

import pdsl
from pdsl import topology
from pdsl.algorithms import ALGORITHMS, Algorithm
from pdsl.algorithms.cga import CGA, project
from pdsl.algorithms.def_kt import DefKT
from pdsl.algorithms.mixing import best_omega, chebyshev_omega, gossip_steps_to_agree
from pdsl.algorithms.schedule import learning_rates
from pdsl.config import load, validate
from pdsl.models.network import Network
from pdsl.settings import ScheduleSettings
from pdsl.shapley.valuation import Validation
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.commands import pdsl as command
from tests.helpers.commands import result_of, settings
from tests.helpers.refusals import refused
from tests.oracles.quadratics import heterogeneous, mixing, polynomial, run, start

M, D, T = 6, 5, 9
GRAPH = topology.erdos_renyi(M, 0.5, 2)
W = mixing(GRAPH)
PROBLEM = heterogeneous(M, D, seed=2, jitter=0.5)
X0 = start(M, D)
ZERO = torch.zeros_like(X0)
SCHEDULE = ScheduleSettings(kind="cosine", warmup=2, final=0.1)
PEAK = 0.1
RATES = learning_rates(PEAK, SCHEDULE, T)


def by_torch(make: Callable[[torch.optim.Optimizer], LRScheduler], rounds: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    scheduler, found = make(optimizer), []
    for _ in range(rounds):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine_and_step_are_those_of_pytorch() -> None:
    cosine = learning_rates(0.8, ScheduleSettings(kind="cosine", final=0.25), 20)
    assert cosine == pytest.approx(by_torch(lambda o: CosineAnnealingLR(o, T_max=20, eta_min=0.2), 20), rel=1e-12)
    step = learning_rates(0.8, ScheduleSettings(kind="step", every=7, factor=0.3), 20)
    assert step == pytest.approx(by_torch(lambda o: StepLR(o, step_size=7, gamma=0.3), 20), rel=1e-12)


def test_warm_up_rises_linearly_and_then_the_schedule_begins() -> None:
    assert learning_rates(2.0, ScheduleSettings(warmup=4), 6) == (0.5, 1.0, 1.5, 2.0, 2.0, 2.0)
    assert learning_rates(8.0, ScheduleSettings(kind="step", warmup=2, every=2), 8) == (4, 8, 8, 8, 4, 4, 2, 2)
    cosine = learning_rates(1.0, ScheduleSettings(kind="cosine", warmup=1), 5)
    assert cosine == pytest.approx((1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2))


def test_a_function_of_the_round_gives_the_rates() -> None:
    assert learning_rates(lambda t: 1 / t, ScheduleSettings(), 3) == (1, 1 / 2, 1 / 3)
    assert learning_rates("math:sqrt", ScheduleSettings(), 2) == (1.0, math.sqrt(2))


def gradients(x: Tensor, t: int, step: int = 0) -> Tensor:
    return PROBLEM.gradients(t, torch.arange(M), x, step)


def cross(i: int, j: int, x: Tensor, t: int) -> Tensor:
    """∇f_j(x_i)."""
    return PROBLEM.gradient(j, x[i], t)


def d_psgd() -> Tensor:
    x = X0
    for t, gamma in enumerate(RATES, 1):
        x = W @ (x - gamma * gradients(x, t))
    return x


def muffliato() -> Tensor:
    x, gap = X0, GRAPH.spectral_gap
    P = torch.from_numpy(polynomial(GRAPH.W, gossip_steps_to_agree(GRAPH), chebyshev_omega(gap)))
    for t, gamma in enumerate(RATES, 1):
        x = P @ (x - gamma * gradients(x, t))
    return x


def dmsgd() -> Tensor:
    x, u = X0, ZERO
    for t, gamma in enumerate(RATES, 1):
        u = 0.5 * u + gradients(x, t)
        x, u = W @ (x - gamma * u), W @ u
    return x


def qg_dsgdm() -> Tensor:
    x, u = X0, ZERO
    for t, gamma in enumerate(RATES, 1):
        after = W @ (x - gamma * (0.5 * u + gradients(x, t)))
        x, u = after, 0.5 * u + 0.5 * (x - after) / gamma
    return x


def gradient_tracking() -> Tensor:
    x, y, last = X0, ZERO, ZERO
    for t, gamma in enumerate(RATES, 1):
        g = gradients(x, t)
        y, last = y + g - last, g
        x, y = W @ (x - gamma * y), W @ y
    return x


def momentum_tracking() -> Tensor:
    x, u, c = X0, ZERO, ZERO
    for t, gamma in enumerate(RATES, 1):
        u = 0.5 * u + gradients(x, t)
        x = W @ (x - gamma * (u - c))
        c = W @ (c - u) + u
    return x


def gut() -> Tensor:
    """The update of a round is over the γ of that round, not of the next."""
    x, before, last, rate = X0, X0, ZERO, 1.0
    lazy = (W + torch.eye(M, dtype=W.dtype)) / 2
    for t, gamma in enumerate(RATES, 1):
        g = gradients(x, t)
        d = g + (before - x) / rate - last
        x, before, last, rate = lazy @ (x - gamma * d), x, g, gamma
    return x


def net_fleet() -> Tensor:
    x, v, last = X0, ZERO, ZERO
    for t, gamma in enumerate(RATES, 1):
        for k in range(2):
            g = gradients(x, t, k)
            v, last = v + g - last, g
            x = x - gamma * v
        x, v = W @ x, W @ v
    return x


def dfedsam(Q: int = 1) -> Tensor:
    x = X0
    for t, gamma in enumerate(RATES, 1):
        for k in range(2):
            g = gradients(x, t, k)
            x = x - gamma * gradients(x + 0.05 * g / g.norm(dim=1, keepdim=True), t, k)
        x = torch.linalg.matrix_power(W, Q) @ x
    return x


def mspd() -> Tensor:
    """y is in units of a gradient, whatever the γ of the round."""
    x, before, y = X0, X0, ZERO
    P = torch.from_numpy(polynomial(GRAPH.W, 2, chebyshev_omega(GRAPH.spectral_gap)))
    for t, gamma in enumerate(RATES, 1):
        ahead = 2 * x - before
        y = y - 0.5 / gamma * (ahead - P @ ahead)
        z = x - gamma * (gradients(x, t, 0) - y)
        z = z / 3 - 2 / 3 * (gamma * (gradients(z, t, 1) - y) - x)
        x, before = z, x
    return x


def dp_admm() -> Tensor:
    """p is in units of a gradient, whatever the γ of the round; γ·c is the same in all rounds."""
    x, p = X0, ZERO
    for t, gamma in enumerate(RATES, 1):
        c, mixed = 0.25 / gamma, W @ x
        p = p + c * (x - mixed)
        anchor = (x + mixed) / 2
        for k in range(2):
            x = x - gamma * (gradients(x, t, k) + p + 2 * c * (x - anchor))
    return x


def ngc() -> Tensor:
    x, u = X0, ZERO
    for t, gamma in enumerate(RATES, 1):
        pairs = [(i, int(j)) for i in range(M) for j in GRAPH.neighbourhood(i)]
        g = torch.zeros_like(x)
        for i, j in pairs:
            g[i] += GRAPH.W[i, j] * (cross(i, j, x, t) + cross(j, i, x, t)) / 2
        u = 0.5 * u + g
        x = W @ (x - gamma * (g + 0.5 * u))
    return x


def cga() -> Tensor:
    x, u = X0, ZERO
    for t, gamma in enumerate(RATES, 1):
        directions = []
        for i in range(M):
            rows = torch.stack([GRAPH.W[i, j] * cross(i, int(j), x, t) for j in GRAPH.neighbourhood(i)])
            directions.append(project(rows, cross(i, i, x, t), [D])[0])
        u = 0.5 * u + torch.stack(directions)
        x = W @ (x - gamma * u)
    return x


def pdsl_uniform() -> Tensor:
    x, u = X0, ZERO
    K = min(10, gossip_steps_to_agree(GRAPH))
    P = torch.from_numpy(polynomial(GRAPH.W, K, best_omega(GRAPH, K)))
    for t, gamma in enumerate(RATES, 1):
        u = 0.5 * u
        for i in range(M):
            u[i] += sum(GRAPH.W[i, j] * cross(i, int(j), x, t) for j in GRAPH.neighbourhood(i))
        x, u = P @ (x - gamma * u), W @ u
    return x


WRITTEN_OUT: dict[str, Callable[[], Tensor]] = {
    "pdsl": pdsl_uniform,
    "dp-dpsgd": d_psgd,
    "muffliato": muffliato,
    "dp-cga": cga,
    "dp-net-fleet": net_fleet,
    "d-psgd": d_psgd,
    "dmsgd": dmsgd,
    "cga": cga,
    "ngc": ngc,
    "net-fleet": net_fleet,
    "qg-dsgdm": qg_dsgdm,
    "gradient-tracking": gradient_tracking,
    "momentum-tracking": momentum_tracking,
    "gut": gut,
    "dfedsam": dfedsam,
    "dfedsam-mgs": lambda: dfedsam(4),
    "soft-dsgd": d_psgd,
    "mspd": mspd,
    "dp-admm": dp_admm,
}
CHANGED = {"pdsl": {"shapley": {"weighting": "uniform"}}, "soft-dsgd": {"reliability": 1.0}}


def scheduled(name: str) -> Algorithm:
    rate = {"learning_rate": PEAK, "schedule": SCHEDULE}
    return ALGORITHMS[name].model_validate({**rate, **CHANGED.get(name, {})})


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_an_algorithm_with_a_schedule_is_its_rule_written_out(name: str) -> None:
    algorithm = scheduled(name)
    with Workers(1) as workers:
        unused = Validation(Network(torch.nn.Linear(1, 1)), torch.zeros(0, 1), torch.zeros(0), Streams(0), workers)
        found = run(algorithm, PROBLEM, GRAPH, T, X0, validation=unused).x[-1]
    torch.testing.assert_close(found, WRITTEN_OUT[name](), rtol=0, atol=1e-8 if isinstance(algorithm, CGA) else 1e-12)


def test_every_algorithm_is_written_out() -> None:
    assert WRITTEN_OUT.keys() | {DefKT.name} == ALGORITHMS.keys()


def test_def_kt_with_a_schedule_takes_steps_of_its_length() -> None:
    """With γ of round t alone: one round from the same state with that rate, constant."""
    values = {
        "rounds": 3,
        "graph": {"kind": "ring", "agents": 4},
        "model": {"name": "softmax"},
        "privacy": {"mode": "none"},
        "engine": {"workers": 1},
    }
    cosine = {"name": "def-kt", "learning_rate": 0.5, "schedule": {"kind": "cosine"}}
    e = prepare(validate({**values, "algorithm": cosine}, "test"))
    scheduled_steps = list(rounds(e))
    for t in (2, 3):
        constant = {"name": "def-kt", "learning_rate": e.learning_rates[t - 1]}
        other = prepare(validate({**values, "algorithm": constant}, "test"))
        again = next(iter(rounds(other, scheduled_steps[t - 2].state, after=t - 1)))
        assert torch.equal(again.state.x, scheduled_steps[t - 1].state.x)


SMALL = ["graph.agents=4", "model.name=softmax", "data.validation=40", "batch.size=16"]
COSINE = ["algorithm.learning_rate=0.5", "algorithm.schedule.kind=cosine", "algorithm.schedule.warmup=2"]


@pytest.mark.parametrize("changed", [COSINE, ["algorithm.learning_rate=math:sqrt"]], ids=["cosine", "function"])
def test_resumed_with_a_schedule_it_ends_as_if_never_cut(changed: list[str], tmp_path: Path) -> None:
    asked = settings("rounds=6", "privacy.noise_multiplier=1", "privacy.randomness=system", *SMALL, *changed)
    assert command("run", "--json", "--out", tmp_path / "run", *asked).code == 0
    whole = result_of(tmp_path / "run")
    run = tmp_path / "run"
    lines = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 6
    for file in (run / "checkpoint").glob("*6*"):
        file.unlink()
    (run / "summary.json").unlink()
    assert command("run", "--json", "--out", run, *asked).code == 0
    again = result_of(run)
    assert whole["rows.jsonl"] == again["rows.jsonl"]
    assert whole["summary"]["models_sha256"] == again["summary"]["models_sha256"]
    command("run", "--resume", run, "--set", "rounds=9").refused("depends on its number of rounds, 6")


def test_a_constant_rate_and_steps_may_be_extended(tmp_path: Path) -> None:
    asked = ["privacy.mode=none", "algorithm.learning_rate=0.5", "algorithm.schedule.kind=step", *SMALL]
    asked += ["algorithm.schedule.every=2"]
    assert command("run", "--json", "--out", tmp_path / "whole", *settings("rounds=5", *asked)).code == 0
    assert command("run", "--json", "--out", tmp_path / "cut", *settings("rounds=3", *asked)).code == 0
    assert command("run", "--json", "--resume", tmp_path / "cut", "--set", "rounds=5").code == 0
    assert result_of(tmp_path / "whole")["rows.jsonl"] == result_of(tmp_path / "cut")["rows.jsonl"]


def failing(t: int) -> float:
    raise KeyError("no rate")


MISTAKES: dict[str, tuple[object, str]] = {
    "negative": (-1, "PDSL: learning_rate=-1: must be a finite number above 0"),
    "text": ("fast", "PDSL: learning_rate='fast': must be a number above 0"),
    "no number": (None, "PDSL: learning_rate=None: must be a number above 0"),
    "truth": (True, "PDSL: learning_rate=True: must be a number above 0"),
}


@pytest.mark.parametrize(("rate", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(rate: object, message: str) -> None:
    with pytest.raises(PdslError) as raised:
        pdsl.PDSL(learning_rate=rate)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


FUNCTIONS: dict[str, tuple[object, str]] = {
    "fails": (failing, "the function fails in round 1: KeyError: 'no rate'"),
    "zero": (lambda t: 2 - t, "the rate of round 2 is 0"),
    "not finite": (lambda t: math.inf, "the rate of round 1 is inf"),
    "no number": (lambda t: "fast", "the function fails in round 1: ValueError"),
    "no such function": ("math:fast", "algorithm.learning_rate=math:fast"),
    "not a function": ("math:pi", "algorithm.learning_rate=math:pi is a float"),
}


@pytest.mark.parametrize(("rate", "message"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_mistaken_function_is_one_line(rate: object, message: str) -> None:
    with refused(message):
        pdsl.train(data="digits", graph=pdsl.ring(3), algorithm=pdsl.PDSL(learning_rate=rate), rounds=3)  # type: ignore[arg-type]


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with refused("warmup=5 must be below rounds=5"):
        learning_rates(1.0, ScheduleSettings(warmup=5), 5)
    with refused("a function of the round already"):
        learning_rates(lambda t: 1.0, ScheduleSettings(warmup=1), 5)
    with refused("algorithm.schedule.kind=linear"):
        load(None, ["algorithm.schedule.kind=linear"])


def test_a_config_names_a_function_by_its_path_and_no_other() -> None:
    named = validate({"algorithm": pdsl.PDSL(learning_rate=failing)}, "test").as_dict()["algorithm"]["learning_rate"]
    assert named == f"{__name__}:failing"
    config = validate({"algorithm": pdsl.PDSL(learning_rate=lambda t: 1.0)}, "test")
    assert config.as_dict()["algorithm"]["learning_rate"] == "python"
    with refused("was a function given in Python, which a config cannot name"):
        prepare(validate(config.as_dict(), "test"))


def test_the_rate_of_each_round_is_public_in_the_result() -> None:
    algorithm = pdsl.PDSL(learning_rate=lambda t: 1 / t)
    result = pdsl.train("softmax", graph=pdsl.ring(4), algorithm=algorithm, rounds=4, privacy={"mode": "none"})
    assert result.experiment.learning_rates == (1, 1 / 2, 1 / 3, 1 / 4)
    assert result.summary["learning_rate"] == 1.0


def test_a_function_given_in_python_is_given_again_to_resume(tmp_path: Path) -> None:
    def train(rate: Callable[[int], float]) -> pdsl.Result:
        algorithm = pdsl.PDSL(learning_rate=rate)
        return pdsl.train(
            "softmax", graph=pdsl.ring(4), algorithm=algorithm, rounds=4, out=tmp_path / "run", progress=False
        )

    whole = train(lambda t: 1 / t).summary["models_sha256"]
    (tmp_path / "run/summary.json").unlink()
    next((tmp_path / "run/checkpoint").glob("*4*")).unlink()
    assert train(lambda t: 1 / t).summary["models_sha256"] == whole
    (tmp_path / "run/summary.json").unlink()
    with pytest.raises(PdslError, match="changed since the run started"):
        train(lambda t: 2 / t)
