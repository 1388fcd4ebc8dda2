"""`pdsl privacy`: ε from noise and noise from ε, against each other and published numbers; and its errors."""

import io
import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from pdsl.cli.privacy import command, table
from pdsl.privacy import planning
from pdsl.privacy.planning import ADVERSARIES, BOUNDS, MAX_CURVE_POINTS
from pdsl.utils.errors import PdslError
from tests.helpers.refusals import refused

CLOSE = 0.005
RUN: dict[str, Any] = {"graph": "full", "agents": 10, "rounds": 200, "samples": 6000, "batch": 250}


def plan(**settings: Any) -> dict[str, Any]:
    return asdict(planning.plan(**settings))


def invoked(line: str) -> str:
    app = typer.Typer()
    app.command("privacy")(command)
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def answered(line: str) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    answer: dict[str, Any] = json.loads(invoked(f"{line} --json"), parse_constant=no_constant)
    return answer


def consistent(p: dict[str, Any]) -> None:
    """Check the invariants of every plan."""
    assert set(p["adversaries"]) == set(ADVERSARIES)
    assert set(p["bounds"]) == set(BOUNDS)
    assert p["epsilon_per_round"] <= p["epsilon"] <= p["epsilon_rdp"]
    assert {adversary["epsilon"] for adversary in p["adversaries"].values()} == {p["epsilon"]}
    rounds, values = zip(*p["curve"], strict=True)
    assert len(rounds) == min(MAX_CURVE_POINTS, p["rounds"])
    assert list(rounds) == sorted(set(rounds))
    assert list(values) == sorted(values)
    assert p["curve"][-1] == [p["rounds"], p["epsilon"]]
    if p["sigma"] is not None:
        assert p["noise_multiplier"] == pytest.approx(p["sigma"] / (math.sqrt(p["k"]) * p["sensitivity"]))


def test_noise_for_an_epsilon() -> None:
    p = answered("--graph full --agents 10 --rounds 200 --samples 6000 --batch 250 --target-epsilon 1 --delta 1e-5")
    consistent(p)
    assert p["noise_multiplier"] == pytest.approx(2.416, rel=CLOSE)
    assert 0.985 <= p["epsilon"] <= 1
    assert p["k"] == 10
    assert p["sample_rate"] == pytest.approx(250 / 6000)
    assert p["sigma"] == pytest.approx(2.416 * math.sqrt(10) / 250, rel=CLOSE)
    assert (p["rounds"], p["delta"], p["adjacency"]) == (200, 1e-5, "add or remove one record")


def test_epsilon_for_a_noise() -> None:
    """Opacus's own test, opacus/tests/accountants_test.py: RDP 7.32911117143, PRV (2249 steps) 6.777395712150674."""
    p = answered("--noise-multiplier 1.5 --sample-rate 0.04 --rounds 2250 --k 1 --delta 1e-5")
    consistent(p)
    assert p["noise_multiplier"] == 1.5
    assert p["epsilon"] == pytest.approx(6.777395712150674, rel=CLOSE)
    assert p["epsilon_rdp"] == pytest.approx(7.32911117143, rel=1e-3)
    assert p["sigma"] is None  # Δ depends on the batch size
    assert p["bounds"]["theorem1"] is None  # needs a graph
    assert p["bounds"]["joint_per_sample"] is None


@pytest.mark.parametrize(
    ("graph", "k", "theorem1", "joint", "per_sample"),
    [
        ("full", 10, 4213, 238, 0.477),
        ("ring", 3, 839, 131, 0.261),
    ],
)
def test_bounds_for_one_round(graph: str, k: int, theorem1: float, joint: float, per_sample: float) -> None:
    """Computed by hand from Theorem 1, from σ/Δ = 60.560 and 37.690 at ε = 0.08, and from C = 1, B = 250."""
    p = plan(graph=graph, agents=10, rounds=1, samples=6000, batch=250, target_epsilon=0.08)
    assert p["k"] == k
    assert p["epsilon_per_round"] == p["epsilon"] == pytest.approx(0.08, rel=CLOSE)
    assert p["bounds"] == {
        "theorem1": pytest.approx(theorem1, rel=CLOSE),
        "classic_per_message": pytest.approx(2 * 60.560, rel=CLOSE),
        "analytic_per_message": pytest.approx(2 * 37.690, rel=CLOSE),
        "joint": pytest.approx(joint, rel=CLOSE),
        "joint_per_sample": pytest.approx(per_sample, rel=CLOSE),
    }


def test_theorem1_grows_as_the_least_share_falls() -> None:
    equal, small = (plan(**RUN, noise_multiplier=1, phi_min=phi)["bounds"]["theorem1"] for phi in (None, 0.01))
    assert small == pytest.approx(10 * equal)


def test_the_classic_bound_is_not_claimed_beyond_its_range() -> None:
    bounds = plan(rounds=1, k=1, sampler="fixed", target_epsilon=2)["bounds"]
    assert bounds["classic_per_message"] is None
    assert bounds["analytic_per_message"] is not None


@pytest.mark.parametrize("clipping", ["per-sample", "batch"])
@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_the_three_ways_to_ask_agree(sampler: str, clipping: str) -> None:
    settings: dict[str, Any] = {**RUN, "sampler": sampler, "clipping": clipping, "max_grad_norm": 0.5}
    asked = plan(**settings, target_epsilon=3)
    consistent(asked)
    for name in ("noise_multiplier", "sigma"):
        again = plan(**settings, **{name: asked[name]})
        assert again["epsilon"] == pytest.approx(asked["epsilon"], rel=1e-6)
        assert again["sigma"] == pytest.approx(asked["sigma"])


def test_sensitivity_is_that_of_the_mechanism() -> None:
    for sampler, clipping, expected in [
        ("poisson", "per-sample", 0.5 / 250),
        ("fixed", "per-sample", 2 * 0.5 / 250),
        ("poisson", "batch", 2 * 0.5),
        ("fixed", "batch", 2 * 0.5),
    ]:
        p = plan(**RUN, sampler=sampler, clipping=clipping, max_grad_norm=0.5, noise_multiplier=20)
        assert p["sensitivity"] == pytest.approx(expected)


def test_fixed_batches_are_not_amplified() -> None:
    small, large = (plan(**{**RUN, "batch": b}, sampler="fixed", noise_multiplier=20) for b in (10, 6000))
    assert small["epsilon"] == large["epsilon"]
    assert small["sample_rate"] is None
    assert small["adjacency"] == "replace one record"
    assert plan(**RUN, noise_multiplier=20)["epsilon"] < small["epsilon"]


def test_a_batch_of_everything_is_no_sampling() -> None:
    p = plan(**{**RUN, "batch": 7000}, noise_multiplier=20)
    assert p["sample_rate"] == 1
    assert p["sensitivity"] == pytest.approx(1 / 6000)
    assert p["epsilon"] == pytest.approx(plan(**RUN, sampler="fixed", noise_multiplier=20)["epsilon"])


def test_a_rate_and_samples_give_the_batch() -> None:
    p = plan(rounds=10, k=3, samples=6000, sample_rate=0.05, noise_multiplier=1)
    assert p["sensitivity"] == pytest.approx(1 / 300)
    assert p == plan(rounds=10, k=3, batch=300, sample_rate=0.05, noise_multiplier=1)


def test_no_noise_to_speak_of_is_null_in_json() -> None:
    p = answered("--noise-multiplier 1e-9 --sample-rate 0.04 --rounds 3 --k 2")
    assert p["epsilon"] is None
    assert set(p["bounds"].values()) == {None}


@pytest.mark.parametrize(
    "settings",
    [
        {**RUN, "target_epsilon": 1},
        {"rounds": 3, "k": 2, "sample_rate": 0.1, "noise_multiplier": 0.5},
        {"rounds": 3, "k": 2, "sample_rate": 0.1, "noise_multiplier": 1e-9},
        {"rounds": 3, "k": 2, "sampler": "fixed", "noise_multiplier": 1e9},
    ],
)
def test_the_table_says_the_total_first(settings: dict[str, Any]) -> None:
    p = planning.plan(**settings)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table(p))
    lines = console.export_text().splitlines()
    first = next(line for line in lines if "ε" in line)
    assert "total ε" in first
    printed = float(first.split("│")[2].split()[0])
    assert p.epsilon <= printed <= p.epsilon * 1.001  # rounded up


def test_without_json_it_prints_the_table() -> None:
    assert "total ε" in invoked("--noise-multiplier 1.5 --sample-rate 0.04 --rounds 10 --k 1")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rounds": None}, "--rounds"),
        ({"rounds": 0}, "rounds=0"),
        ({"graph": None}, "--graph"),
        ({"agents": None}, "--agents"),
        ({"graph": "torrus"}, "torrus"),
        ({"graph": "torus", "agents": 7}, "torus"),
        ({"graph": "erdos-renyi"}, "--k"),
        ({"k": 3}, "k=3"),
        ({"graph": None, "agents": None, "k": 0}, "k=0"),
        ({"batch": None}, "--batch"),
        ({"batch": 0}, "batch.size=0"),
        ({"samples": 0}, "samples=0"),
        ({"sample_rate": 0.1}, "sample_rate=0.1"),
        ({"samples": None, "sample_rate": 1.5}, "sample_rate=1.5"),
        ({"samples": None, "sample_rate": 0.1, "sampler": "fixed"}, "not amplified"),
        ({"sampler": "shuffled"}, "shuffled"),
        ({"clipping": "none"}, "clipping=none"),
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"delta": 0}, "delta=0"),
        ({"phi_min": 2}, "phi_min=2"),
        ({"target_epsilon": None}, "--target-epsilon"),
        ({"noise_multiplier": 1}, "target_epsilon, noise_multiplier"),
        ({"target_epsilon": -1}, "target_epsilon=-1"),
        ({"target_epsilon": None, "noise_multiplier": 0}, "noise_multiplier=0"),
        ({"target_epsilon": None, "noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"target_epsilon": None, "sigma": 0}, "sigma=0"),
        ({"target_epsilon": None, "sigma": -1}, "sigma=-1"),
        ({"target_epsilon": None, "sigma": 1, "batch": None, "samples": None, "sample_rate": 0.1}, "--batch"),
    ],
)
def test_refusals(change: dict[str, Any], part: str) -> None:
    with refused(part):
        plan(**{**RUN, "target_epsilon": 1, **change})


def test_the_command_leaves_refusals_to_the_command_line() -> None:
    with pytest.raises(PdslError):
        invoked("--rounds 3")
