"""`pdsl theory`: conditions, bound and rounds for given constants, or for those of a run."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdsl.theory import theorem2
from pdsl.theory.theorem2 import Setting, Step
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.theory.constants import Point

WHERE = "theory"
ESTIMATED = "measured at these models, not a bound"
# Measured constants of a run. F* is not measured: it is at least 0, because cross-entropy is.
FROM_MODELS = ("L", "zeta", "kappa")
# Range of each constant: minimum, maximum, whether they are allowed, and an example.
RANGES = {
    "gamma": (0.0, math.inf, False, "0.1"),
    "alpha": (0.0, 1.0, False, "0.5, because the theorem divides by α and by 1 − α"),
    "L": (0.0, math.inf, False, "1"),
    "rho": (0.0, 1.0, True, "0.75, or --graph ring --agents 10"),
    "C": (0.0, math.inf, False, "1"),
    "sigma": (0.0, math.inf, True, "0, for no noise"),
    "d": (1, math.inf, True, "the number of the model's parameters"),
    "zeta": (0.0, math.inf, True, "1"),
    "kappa": (0.0, math.inf, True, "1"),
    "omega_min": (0.0, 1.0, True, "the smallest weight in W"),
    "agents": (2, math.inf, True, "10"),
    "rounds": (1, math.inf, True, "200"),
    "excess": (0.0, math.inf, True, "the loss of the initial model"),
}


def evaluate(given: JsonDict, points: "list[Point] | None" = None) -> JsonDict:
    """Evaluate the theorem for the constants in `given`; the formula only if none is missing."""
    names = list(Step.__dataclass_fields__)
    missing = [name for name in names if name not in given]
    if missing:
        options = " ".join(_option(name) for name in missing)
        raise PdslError(f"{WHERE}: {options} missing; give each a number, --graph and --agents for ρ, or --run for all")
    for name, value in given.items():
        _check(name, value)
    try:
        return _evaluate(Step(**{name: given[name] for name in names}), given, points)
    except ArithmeticError as e:
        raise PdslError(f"{WHERE}: constants are too large or too small; try constants from 1e-30 to 1e30") from e


def _evaluate(s: Step, given: JsonDict, points: "list[Point] | None") -> JsonDict:
    lacking = [name for name in Setting.__dataclass_fields__ if name not in given]
    terms = None
    if not lacking:
        terms = theorem2.formula(s, Setting(**{name: given[name] for name in Setting.__dataclass_fields__}))
    conditions = theorem2.conditions(s)
    violated = [c.name for c in conditions if not c.holds]
    rounds = theorem2.corollary_rounds(s.alpha, s.L, s.rho)
    max_gamma = min(theorem2.max_gamma_disagreement(s), theorem2.max_gamma_absorption(s))
    return {
        "constants": {name: given[name] for name in RANGES if name in given},
        "estimated": {} if points is None else dict.fromkeys(FROM_MODELS, ESTIMATED),
        "conditions": [asdict(c) for c in conditions],
        "violated": violated,
        "gamma_above": theorem2.min_gamma(s.alpha),
        "gamma_at_most": max_gamma,
        "multipliers": theorem2.multipliers(s),
        "formula": terms,
        "formula_lacks": lacking,
        "bound": terms["sum"] if terms is not None and not violated else None,
        "corollary": {
            "rounds": max(rounds.values()),
            "rounds_by_condition": dict(rounds),
            "rounds_below": theorem2.corollary_max_rounds(s.alpha),
        },
        "measured": None if points is None else [asdict(point) for point in points],
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(name: str, value: float) -> None:
    low, high, included, hint = RANGES[name]
    inside = low <= value <= high if included else low < value < high
    if not (math.isfinite(value) and inside):
        between = f"at least {low:g}" if included else f"above {low:g}"
        if high < math.inf:
            between += f" and {'at most' if included else 'below'} {high:g}"
        raise PdslError(f"{WHERE}: {name}={value} must be {between}; try {hint}")


def _graph_constants(kind: str, agents: int | None) -> JsonDict:
    """ρ and ω_min of a topology."""
    from pdsl.config import validate
    from pdsl.privacy.planning import UNDETERMINED_GRAPHS
    from pdsl.topology import SCHEDULES, build
    from pdsl.utils.random import Streams

    if kind in SCHEDULES:
        raise PdslError(f"{WHERE}: graph={kind} changes from round to round, and Theorem 2 is about one graph")
    if kind in UNDETERMINED_GRAPHS:
        raise PdslError(f"{WHERE}: graph={kind} has no fixed ρ; try --rho, or --run")
    if agents is None:
        raise PdslError(f"{WHERE}: --graph {kind} needs its size; try --agents 10")
    graph = build(validate({"graph": {"kind": kind, "agents": agents}}, WHERE).graph, Streams(0))
    return {"rho": (1 - graph.spectral_gap) ** 2, "omega_min": float(graph.omega.min())}


def table(a: JsonDict) -> "Table":
    """Format the result of `evaluate` for the terminal."""
    from rich.table import Table

    rows = Table(show_header=False, title="Theorem 2 and Corollary 1", title_justify="left")
    for name, value in a["constants"].items():
        note = f"  (estimate: {a['estimated'][name]})" if name in a["estimated"] else ""
        rows.add_row(name, f"{value:.6g}{note}")
    rows.add_section()
    for c in a["conditions"]:
        sign = "holds" if c["holds"] else "VIOLATED"
        rows.add_row(f"{c['name']}: {sign}", f"{c['requires']}: {c['value']:.4g} against {c['limit']:.4g}\n{c['why']}")
    rows.add_row(
        "γ that meets all",
        f"none: above {a['gamma_above']:.4g} and at most {a['gamma_at_most']:.4g}\n"
        "for all α, L and ρ, because absorption implies γ < (1−α)²/(2α)",
    )
    rows.add_section()
    m1 = a["multipliers"]["m1"]
    if a["formula"] is None:
        rows.add_row("bound on mean ‖∇F(x̄)‖²", f"needs {' '.join(_option(n) for n in a['formula_lacks'])}")
    else:
        f = a["formula"]
        rows.add_row(
            "bound on mean ‖∇F(x̄)‖²", "none: the theorem does not apply" if a["violated"] else f"{f['sum']:.4g}"
        )
        sense = "" if m1 > 0 else ", negative because m1 < 0" if m1 < 0 else ", because m1 = 0"
        rows.add_row(
            "formula, ignoring conditions",
            f"{f['sum']:.4g}{sense}\n= {f['start']:.4g} (start) + {f['messages']:.4g} (messages)"
            f" + {f['disagreement']:.4g} (disagreement)",
        )
    c = a["corollary"]
    rows.add_row(
        "Corollary 1, γ = 1/√T",
        f"needs T ≥ {math.ceil(c['rounds']):,}" if math.isfinite(c["rounds"]) else "no T is enough: ρ = 1",
    )
    rows.add_row("", f"but m1 > 0 only for T < {c['rounds_below']:.4g}")
    if a["measured"] is not None:
        rows.add_section()
        for p in a["measured"]:
            rows.add_row(
                f"measured after round {p['round']}",
                f"‖∇F(x̄)‖² = {p['squared_gradient']:.4g}, F = {p['loss']:.4g}\n"
                f"L = {p['L']:.4g}, ζ = {p['zeta']:.4g}, κ = {p['kappa']:.4g} at this model",
            )
    return rows


def command(
    run: Annotated[
        Path | None, typer.Option(help="Run directory to measure; other options override its constants.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Learning rate γ.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Momentum α.")] = None,
    smoothness: Annotated[float | None, typer.Option("--L", help="Smoothness L of the agents' losses.")] = None,
    rho: Annotated[float | None, typer.Option(help="ρ = max(|λ_2|, |λ_M|)² of W.")] = None,
    graph: Annotated[
        str | None, typer.Option(help="Topology, e.g. ring; sets ρ and ω_min together with --agents.")
    ] = None,
    agents: Annotated[int | None, typer.Option(help="Number of agents M.")] = None,
    omega_min: Annotated[float | None, typer.Option(help="Smallest positive weight in W.")] = None,
    threshold: Annotated[float | None, typer.Option("--C", help="Clipping threshold C.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the noise on a message.")] = None,
    parameters: Annotated[int | None, typer.Option("--d", help="Number of parameters d.")] = None,
    zeta: Annotated[float | None, typer.Option(help="ζ, RMS distance of a batch's gradient from its agent's.")] = None,
    kappa: Annotated[float | None, typer.Option(help="κ, distance of an agent's gradient from the mean.")] = None,
    excess: Annotated[float | None, typer.Option(help="F(x̄⁰) − F*, initial loss above the minimum.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds T.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Evaluate Theorem 2 and Corollary 1; with --run, also measure the gradients of a run."""
    from rich.console import Console

    from pdsl.cli.privacy import finite_only

    options = {
        "gamma": gamma,
        "alpha": alpha,
        "L": smoothness,
        "rho": rho,
        "C": threshold,
        "sigma": sigma,
        "d": parameters,
        "zeta": zeta,
        "kappa": kappa,
        "omega_min": omega_min,
        "agents": agents,
        "rounds": rounds,
        "excess": excess,
    }
    given = {name: value for name, value in options.items() if value is not None}
    points = None
    if run is not None:
        from pdsl.theory.constants import measure_run

        if graph is not None:
            raise PdslError(f"{WHERE}: --run has its own graph; leave out --graph")
        found = measure_run(run, lambda message: print(message, file=sys.stderr))
        for complaint in found.complaints:
            print(f"pdsl: {complaint}", file=sys.stderr)
        points = found.points
        given = {**asdict(found.step), **asdict(found.setting), **given}
    elif graph is not None:
        given = {**_graph_constants(graph, agents), **given}
    a = evaluate(given, points)
    for name in [name for name in a["estimated"] if options[name] is not None]:
        del a["estimated"][name]
    if as_json:
        print(json.dumps(finite_only(a)))
    else:
        Console(markup=False, emoji=False, highlight=False).print(table(a))
