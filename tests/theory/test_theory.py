"""`pdsl theory`: Theorem 2 and Corollary 1 against numbers worked out by hand and the paper's formulas written again
here; a run's gradients against softmax regression in numpy."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pdsl.runs.runner import resume
from pdsl.theory.constants import BATCHES, spectral_norm
from pdsl.theory.theorem2 import Setting, Step, conditions, corollary_rounds, formula, min_gamma, multipliers
from pdsl.topology import bipartite, full, ring
from tests.helpers.commands import SMALL, pdsl, settings

pytestmark = pytest.mark.slow

HAND = Step(gamma=1.0, alpha=0.5, L=1.0, rho=0.25)
HAND_SETTING = Setting(C=1.0, sigma=1.0, d=3, zeta=1.0, kappa=1.0, omega_min=0.5, agents=2, rounds=4, excess=8.0)
shares = st.floats(0.01, 0.99)
steps = st.builds(Step, gamma=st.floats(1e-4, 1e3), alpha=shares, L=st.floats(1e-3, 1e3), rho=st.floats(0, 0.99))


def violated(s: Step) -> list[str]:
    return [c.name for c in conditions(s) if not c.holds]


def answered(*args: object) -> dict[str, Any]:
    outcome = pdsl("theory", *args, "--json")
    assert outcome.code == 0, outcome.err
    answer: dict[str, Any] = json.loads(outcome.out)
    return answer


def test_numbers_worked_out_by_hand() -> None:
    assert multipliers(HAND) == pytest.approx({"m1": 0.5, "m2": 8, "m3": 1, "m4": 4, "m5": 2})
    # 8/(0.5·4);  (8 + 0.25/0.0625 + 4)·(64 + 192 + 1);  2·(16·4·16·16 + 4·20·16)
    assert formula(HAND, HAND_SETTING) == pytest.approx(
        {"start": 4, "messages": 4112, "disagreement": 35328, "sum": 39444}
    )
    limits = {c.name: c.limit for c in conditions(HAND)}
    assert limits == pytest.approx(
        {
            "connectivity": 1,
            "descent": 0.5,
            "disagreement": 0.125 / math.sqrt(26),
            "absorption": 0.125 / 52 * (math.sqrt(209) - 1),  # 52·0.25/(0.25·0.25) = 208
        }
    )
    assert violated(HAND) == ["disagreement", "absorption"]
    assert corollary_rounds(0.5, 1.0, 0.25)["disagreement"] == pytest.approx(104 * 16)


@given(steps, st.floats(0.1, 10), st.floats(0, 10), st.integers(1, 10**6), st.floats(0, 5), st.floats(0, 5))
def test_formulas_as_the_paper_writes_them(s: Step, C: float, sigma: float, d: int, zeta: float, kappa: float) -> None:
    γ, α, L, ρ = s.gamma, s.alpha, s.L, s.rho
    ω, M, T, excess = 1 / 7, 12, 40, 2.5
    m1 = γ / (2 * (1 - α)) - (1 - α) / (2 * α)
    if abs(m1) < 1e-9:
        return
    m2 = (1 / m1) * ((α * L * γ**2) / (2 * (1 - α) ** 3) + (L * γ**2) / (2 * (1 - α) ** 2))
    m3 = L * (1 - α) / (2 * m1 * α)
    m4 = α * γ**2 / (2 * m1 * (1 - α) ** 3)
    m5 = L**2 * γ / (2 * m1 * (1 - α))
    lines = (
        (1 / (m1 * T)) * excess,
        (m2 + m3 * γ**2 * α**2 / (1 - α) ** 4 + m4) * (4 * C**2 / ω**4 + 4 * sigma**2 * d / ω**4 + 2 * zeta**2 / M),
        m5
        * (
            16 * γ**2 * (C**2 + sigma**2 * d) / (ω**4 * (1 - α) ** 2 * (1 - ρ**0.5) ** 2)
            + 4 * γ**2 * (7 * zeta**2 + 13 * kappa**2) / ((1 - α) ** 2 * (1 - ρ**0.5) ** 2)
        ),
    )
    ours = formula(s, Setting(C, sigma, d, zeta, kappa, ω, M, T, excess))
    assert list(ours.values()) == pytest.approx([*lines, sum(lines)], rel=1e-6)

    in_theorem = (
        α
        * (1 - ρ**0.5) ** 2
        * (2 * 13**0.5 * L) ** -2
        * (-1 + (52 * L**2 * (1 - α) ** 2 / (α**2 * (1 - ρ**0.5) ** 2) + 1) ** 0.5)
    )
    in_appendix = (1 - ρ**0.5) * (52 * L**2 * (1 - α) ** 2 + α**2 * (1 - ρ**0.5) ** 2) ** 0.5 / (52 * L**2) - (
        α * (1 - ρ**0.5) ** 2 / (52 * L**2)
    )
    rounding = 1e-14 * α / L**2  # of the differences that the paper writes
    limits = {c.name: c.limit for c in conditions(s)}
    assert limits["absorption"] == pytest.approx(in_theorem, rel=1e-6, abs=rounding)
    assert limits["absorption"] == pytest.approx(in_appendix, rel=1e-6, abs=rounding)
    assert limits["disagreement"] == pytest.approx((1 - α) * (1 - ρ**0.5) / (2 * 26**0.5 * L))
    assert corollary_rounds(α, L, ρ) == pytest.approx(
        {
            "disagreement": 104 * L**2 / ((1 - α) ** 2 * (1 - ρ**0.5) ** 2),
            "absorption": limits["absorption"] ** -2,
        }
    )


def test_the_corollary_s_second_term_as_the_paper_writes_it() -> None:
    α, L, root = 0.7, 3.0, 0.4
    written = (
        52**2
        * L**4
        / ((1 - root) * math.sqrt(52 * L**2 * (1 - α) ** 2 + α**2 * (1 - root) ** 2) - α * (1 - root) ** 2) ** 2
    )
    assert corollary_rounds(α, L, root**2)["absorption"] == pytest.approx(written)


@given(steps)
def test_no_learning_rate_meets_all_conditions(s: Step) -> None:
    """The quadratic of the last condition at γ = (1−α)²/(2α) is negative already, and (1−α)²/α is twice that."""
    half = (1 - s.alpha) ** 2 / (2 * s.alpha)
    at_half = 1 - 2 * s.alpha * half / (1 - s.alpha) ** 2 - 52 * (s.L * half / ((1 - s.alpha) * s.gap)) ** 2
    assert at_half < 1e-12
    limits = {c.name: c.limit for c in conditions(s)}
    assert limits["absorption"] <= half * (1 + 1e-9)
    assert violated(s)
    for gamma in (limits["descent"] * 1.001, limits["absorption"], min_gamma(s.alpha) / 3):
        assert violated(Step(gamma, s.alpha, s.L, s.rho))


def test_a_disconnected_graph_is_named() -> None:
    s = Step(1.0, 0.5, 1.0, 1.0)
    assert "connectivity" in violated(s)
    assert formula(s, HAND_SETTING)["sum"] == math.inf
    assert set(corollary_rounds(0.5, 1.0, 1.0).values()) == {math.inf}


def test_where_m1_is_zero_the_formula_is_infinite() -> None:
    s = Step(0.5, 0.5, 1.0, 0.25)
    assert multipliers(s)["m1"] == 0
    assert formula(s, HAND_SETTING)["sum"] == math.inf
    assert "descent" in violated(s)


@pytest.mark.parametrize(("α", "γ"), [(0.5, 0.001), (0.7, 0.01)])  # the paper's, MNIST and CIFAR-10
def test_the_paper_s_own_learning_rates_violate_it(α: float, γ: float) -> None:
    answer = answered("--gamma", γ, "--alpha", α, "--L", 1, "--graph", "full", "--agents", 10)
    assert answer["violated"] == ["descent"]
    assert answer["multipliers"]["m1"] < 0
    assert answer["bound"] is None
    assert answer["corollary"]["rounds"] > 4 * answer["corollary"]["rounds_below"]


def test_a_negative_formula_is_no_bound() -> None:
    constants = {"gamma": 0.001, "alpha": 0.5, "L": 1, "rho": 0.25, "C": 1, "sigma": 1, "d": 3, "zeta": 1, "kappa": 1}
    constants |= {"omega-min": 0.5, "agents": 2, "rounds": 4, "excess": 8}
    options = [word for name, value in constants.items() for word in (f"--{name}", value)]
    answer = answered(*options)
    assert (answer["violated"], answer["bound"], answer["formula_lacks"]) == (["descent"], None, [])
    assert answer["formula"]["start"] == pytest.approx(8 / (4 * (0.001 - 0.5)))  # m1 = γ − 1/2 at α = 1/2
    assert answer["formula"]["sum"] < 0
    shown = pdsl("theory", *options).out
    assert "does not apply" in shown
    assert "negative because m1 < 0" in shown


def test_rho_of_a_graph_is_the_paper_s() -> None:
    for graph in (ring(10), full(10), bipartite(10)):
        eigenvalues = np.linalg.eigvalsh(graph.W)
        found = answered("--gamma", 1, "--alpha", 0.5, "--L", 1, "--graph", graph.name, "--agents", 10)["constants"]
        assert found["rho"] == pytest.approx(max(abs(eigenvalues[-2]), abs(eigenvalues[0])) ** 2, abs=1e-12)
        assert found["omega_min"] == pytest.approx(graph.W[graph.W > 0].min())
    # of a ring with thirds, λ = (1 + 2 cos(2πk/M))/3
    found = answered("--gamma", 1, "--alpha", 0.5, "--L", 1, "--graph", "ring", "--agents", 10)["constants"]
    assert found["rho"] == pytest.approx(((1 + 2 * math.cos(math.pi / 5)) / 3) ** 2)


def test_smoothness_of_a_quadratic() -> None:
    """f(x) = ½ xᵀAx has L = max |λ(A)|, of either sign."""
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((40, 40)))[0]
    for extreme in (7.0, -7.0):
        A = torch.from_numpy(basis @ np.diag([extreme, *np.linspace(-2, 3, 39)]) @ basis.T)
        assert spectral_norm(lambda v, A=A: A @ v.double(), 40) == pytest.approx(7.0, rel=0.01)
    assert spectral_norm(lambda v: -3 * v, 1) == pytest.approx(3.0)


def softmax_numpy(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient [n, d] of softmax regression, a row per record; theta is weights, then biases."""
    K, p = 10, X.shape[1]
    W, b = theta[: K * p].reshape(K, p), theta[K * p :]
    z = X @ W.T + b
    z -= z.max(1, keepdims=True)
    P = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    loss = -np.log(P[np.arange(len(y)), y]).mean()
    delta = P - np.eye(K)[y]
    return loss, np.concatenate([(delta[:, :, None] * X[:, None, :]).reshape(len(y), -1), delta], axis=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theory") / "run"
    small = [s for s in SMALL if not s.startswith("privacy")]
    outcome = pdsl("run", *settings(*small, "rounds=3", "privacy.target_epsilon=4"), "--out", path, "--json")
    assert outcome.code == 0, outcome.err
    return path


def test_a_run_s_gradients_are_those_of_softmax_regression(run: Path) -> None:
    answer = answered("--run", run)
    e, _ = resume(run)
    assert [point["round"] for point in answer["measured"]] == [0, 2, 3]
    for point in answer["measured"]:
        file = run / "checkpoint" / f"round-{point['round']:06d}.safetensors"
        theta = load_file(file)["x"].double().mean(0).numpy() if point["round"] else np.zeros(650)
        losses, own, deviations = [], [], []
        for agent, part in enumerate(e.parts):
            X, y = e.data.x[part].double().numpy().reshape(len(part), -1), e.data.y[part].numpy()
            loss, g = softmax_numpy(theta, X, y)
            losses.append(loss)
            own.append(g.mean(0))
            drawn = [g[e.batches.draw(agent, t).numpy()].sum(0) / 16 for t in range(1, BATCHES + 1)]
            deviations.append(np.mean([((b - own[-1]) ** 2).sum() for b in drawn]))
        mean = np.mean(own, axis=0)
        assert point["squared_gradient"] == pytest.approx(mean @ mean, rel=1e-4)
        assert point["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert point["kappa"] == pytest.approx(max(np.linalg.norm(g - mean) for g in own), rel=1e-4)
        assert point["zeta"] == pytest.approx(math.sqrt(max(deviations)), rel=1e-4)
    # where all classes are equally likely, the Hessian is (I − 11ᵀ/10)/10 ⊗ mean of (x, 1)(x, 1)ᵀ
    curvatures = []
    for part in e.parts:
        X = e.data.x[part].double().numpy().reshape(len(part), -1)
        X = np.concatenate([X, np.ones((len(X), 1))], axis=1)
        curvatures.append(np.linalg.eigvalsh(X.T @ X / len(X))[-1] / 10)
    assert answer["measured"][0]["L"] == pytest.approx(max(curvatures), rel=0.01)


def test_a_run_s_constants_and_what_is_only_an_estimate(run: Path) -> None:
    answer = answered("--run", run, "--kappa", 9)
    summary = json.loads((run / "summary.json").read_text())
    points = answer["measured"]
    expected = {
        "gamma": tomllib.loads((run / "config.toml").read_text())["algorithm"]["learning_rate"],
        "alpha": 0.5,
        "L": max(p["L"] for p in points),
        "rho": 1 / 9,  # a ring of four: λ = 1, 1/3, 1/3, −1/3
        "C": 1.0,
        "sigma": summary["sigma"],
        "d": 650,
        "zeta": max(p["zeta"] for p in points),
        "kappa": 9.0,
        "omega_min": 1 / 3,
        "agents": 4,
        "rounds": 3,
        "excess": math.log(10),
    }
    assert answer["constants"] == pytest.approx(expected, rel=1e-6)
    assert set(answer["estimated"]) == {"L", "zeta"}
    assert answer["violated"] == ["disagreement", "absorption"]
    assert answer["bound"] is None
    assert answer["formula"]["sum"] > 0
    shown = pdsl("theory", "--run", run).out
    assert "not a bound" in shown
    assert "VIOLATED" in shown


def test_mistakes(run: Path, tmp_path: Path) -> None:
    some = ("--gamma", 1, "--L", 1)
    pdsl("theory").refused("--gamma", "--alpha", "--L", "--rho", "--run")
    for extreme in (("--gamma", 1e-300, "--L", 1e300), ("--gamma", 1e300, "--L", 1)):
        pdsl("theory", *extreme, "--alpha", 0.5, "--rho", 0.5).refused("too large or too small", "1e-30 to 1e30")
    pdsl("theory", *some, "--rho", 0.5, "--alpha", 1).refused("alpha=1", "below 1")
    pdsl("theory", *some, "--rho", 1.5, "--alpha", 0.5).refused("rho=1.5", "at most 1")
    pdsl("theory", *some, "--alpha", 0.5, "--graph", "ring").refused("--agents 10")
    pdsl("theory", *some, "--alpha", 0.5, "--graph", "k-regular", "--agents", 10).refused("k-regular", "--rho")
    pdsl("theory", "--run", run, "--graph", "ring").refused("--graph")
    pdsl("theory", "--run", tmp_path / "nothing").refused("not a run directory")
    other = tmp_path / "other"
    assert pdsl("run", *settings(*SMALL, "rounds=1", "algorithm.name=d-psgd"), "--out", other, "--json").code == 0
    pdsl("theory", "--run", other).refused("d-psgd", "Theorem 2")
