"""`pdsl theory`: the conditions, the bound and the rounds for given constants, or for a run's."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdsl.errors import PdslError
from pdsl.theory import theorem2
from pdsl.theory.theorem2 import Setting, Step

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.theory.measured import Point

WHERE = "theory"
ESTIMATED = "measured at these models, not a bound"
# Constants of a run that are estimates; F* is bounded, not measured: cross-entropy is never below 0.
FROM_MODELS = ("L", "zeta", "kappa")
# Range of each constant: least, greatest, whether these two are allowed, what to try.
RANGES = {
    "gamma": (0.0, math.inf, False, "0.1"),
    "alpha": (0.0, 1.0, False, "0.5, for the theorem divides by α and by 1 − α"),
    "L": (0.0, math.inf, False, "1"),
    "rho": (0.0, 1.0, True, "0.75, or --graph ring --agents 10"),
    "C": (0.0, math.inf, False, "1"),
    "sigma": (0.0, math.inf, True, "0, for no noise"),
    "d": (1, math.inf, True, "the number of the model's parameters"),
    "zeta": (0.0, math.inf, True, "1"),
    "kappa": (0.0, math.inf, True, "1"),
    "omega_min": (0.0, 1.0, True, "the least weight in W"),
    "agents": (2, math.inf, True, "10"),
    "rounds": (1, math.inf, True, "200"),
    "excess": (0.0, math.inf, True, "the first model's loss"),
}


def answer(given: dict[str, Any], points: "list[Point] | None" = None) -> dict[str, Any]:
    """What the theorem says about the constants in `given`; the formula only where none of them is missing."""
    names = list(Step.__dataclass_fields__)
    missing = [name for name in names if name not in given]
    if missing:
        options = " ".join(_option(name) for name in missing)
        raise PdslError(f"{WHERE}: {options} missing; give each a number, --graph and --agents for ρ, or --run for all")
    for name, value in given.items():
        _check(name, value)
    try:
        return _answer(Step(**{name: given[name] for name in names}), given, points)
    except ArithmeticError as e:
        raise PdslError(f"{WHERE}: too large or too small to compute with; try constants from 1e-30 to 1e30") from e


def _answer(s: Step, given: dict[str, Any], points: "list[Point] | None") -> dict[str, Any]:
    lacking = [name for name in Setting.__dataclass_fields__ if name not in given]
    terms = None
    if not lacking:
        terms = theorem2.formula(s, Setting(**{name: given[name] for name in Setting.__dataclass_fields__}))
    conditions = theorem2.conditions(s)
    violated = [c.name for c in conditions if not c.holds]
    rounds = theorem2.corollary_rounds(s.alpha, s.L, s.rho)
    greatest = min(theorem2.greatest_for_disagreement(s), theorem2.greatest_for_absorption(s))
    return {
        "constants": {name: given[name] for name in RANGES if name in given},
        "estimated": {} if points is None else dict.fromkeys(FROM_MODELS, ESTIMATED),
        "conditions": [asdict(c) for c in conditions],
        "violated": violated,
        "gamma_above": theorem2.least_gamma(s.alpha),
        "gamma_at_most": greatest,
        "multipliers": theorem2.multipliers(s),
        "formula": terms,
        "formula_lacks": lacking,
        "bound": terms["sum"] if terms is not None and not violated else None,
        "corollary": {
            "rounds": max(rounds.values()),
            "rounds_by_condition": dict(rounds),
            "rounds_below": theorem2.corollary_rounds_at_most(s.alpha),
        },
        "measured": None if points is None else [asdict(point) for point in points],
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(name: str, value: float) -> None:
    least, greatest, included, hint = RANGES[name]
    inside = least <= value <= greatest if included else least < value < greatest
    if not (math.isfinite(value) and inside):
        between = f"at least {least:g}" if included else f"above {least:g}"
        if greatest < math.inf:
            between += f" and {'at most' if included else 'below'} {greatest:g}"
        raise PdslError(f"{WHERE}: {name}={value} must be {between}; try {hint}")


def _of_graph(kind: str, agents: int | None) -> dict[str, Any]:
    """ρ, ω_min and M of a topology."""
    from pdsl.config import validated
    from pdsl.graph import build
    from pdsl.privacy.calculator import NOT_FIXED
    from pdsl.randomness import Streams

    if kind in NOT_FIXED:
        raise PdslError(f"{WHERE}: graph={kind} has no ρ before it is drawn or read; try --rho, or --run")
    if agents is None:
        raise PdslError(f"{WHERE}: --graph {kind} needs its size; try --agents 10")
    graph = build(validated({"graph": {"kind": kind, "agents": agents}}, WHERE).graph, Streams(0))
    return {"rho": (1 - graph.spectral_gap) ** 2, "omega_min": float(graph.omega.min())}


def table(a: dict[str, Any]) -> "Table":
    """An answer for people."""
    from rich.table import Table

    shown = Table(show_header=False, title="Theorem 2 and Corollary 1", title_justify="left")
    for name, value in a["constants"].items():
        note = f"  (estimate: {a['estimated'][name]})" if name in a["estimated"] else ""
        shown.add_row(name, f"{value:.6g}{note}")
    shown.add_section()
    for c in a["conditions"]:
        sign = "holds" if c["holds"] else "VIOLATED"
        shown.add_row(f"{c['name']}: {sign}", f"{c['requires']}: {c['value']:.4g} against {c['limit']:.4g}\n{c['why']}")
    shown.add_row(
        "γ that meets all",
        f"none: above {a['gamma_above']:.4g} and at most {a['gamma_at_most']:.4g}\n"
        "so for all α, L and ρ: the last condition implies γ < (1−α)²/(2α)",
    )
    shown.add_section()
    m1 = a["multipliers"]["m1"]
    if a["formula"] is None:
        shown.add_row("bound on mean ‖∇F(x̄)‖²", f"needs {' '.join(_option(n) for n in a['formula_lacks'])}")
    else:
        f = a["formula"]
        shown.add_row(
            "bound on mean ‖∇F(x̄)‖²", "none: the theorem does not apply" if a["violated"] else f"{f['sum']:.4g}"
        )
        sense = "" if m1 > 0 else ", negative since m1 < 0" if m1 < 0 else ", since m1 = 0"
        shown.add_row(
            "its formula, conditions aside",
            f"{f['sum']:.4g}{sense}\n= {f['start']:.4g} (start) + {f['messages']:.4g} (messages)"
            f" + {f['disagreement']:.4g} (disagreement)",
        )
    c = a["corollary"]
    shown.add_row(
        "Corollary 1, γ = 1/√T",
        f"asks for T ≥ {math.ceil(c['rounds']):,}" if math.isfinite(c["rounds"]) else "no T is enough: ρ = 1",
    )
    shown.add_row("", f"but its m1 > 0 only for T < {c['rounds_below']:.4g}")
    if a["measured"] is not None:
        shown.add_section()
        for p in a["measured"]:
            shown.add_row(
                f"measured after round {p['round']}",
                f"‖∇F(x̄)‖² = {p['squared_gradient']:.4g}, F = {p['loss']:.4g}\n"
                f"L = {p['L']:.4g}, ζ = {p['zeta']:.4g}, κ = {p['kappa']:.4g} at this model",
            )
    return shown


def command(
    run: Annotated[Path | None, typer.Option(help="A run to measure; other options replace its constants.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Learning rate γ.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Momentum α.")] = None,
    smoothness: Annotated[float | None, typer.Option("--L", help="Smoothness L of the agents' losses.")] = None,
    rho: Annotated[float | None, typer.Option(help="ρ = max(|λ_2|, |λ_M|)² of W.")] = None,
    graph: Annotated[str | None, typer.Option(help="Topology, like ring; with --agents it gives ρ and ω_min.")] = None,
    agents: Annotated[int | None, typer.Option(help="Agents M.")] = None,
    omega_min: Annotated[float | None, typer.Option(help="Least positive weight in W.")] = None,
    threshold: Annotated[float | None, typer.Option("--C", help="Clipping threshold C.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the noise on a message.")] = None,
    parameters: Annotated[int | None, typer.Option("--d", help="Parameters of the model, d.")] = None,
    zeta: Annotated[
        float | None, typer.Option(help="ζ: a batch's gradient from its agent's, root mean square.")
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="κ: an agent's gradient from the mean of all.")] = None,
    excess: Annotated[float | None, typer.Option(help="F(x̄⁰) − F*, loss above the least.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds T.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Theorem 2's conditions and bound, Corollary 1's rounds; with --run, the gradients of a run beside them."""
    from rich.console import Console

    from pdsl.privacy.calculator import finite_only

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
        from pdsl.theory.measured import measure_run

        if graph is not None:
            raise PdslError(f"{WHERE}: --run brings its own graph; leave out --graph")
        found = measure_run(run, lambda what: print(what, file=sys.stderr))
        for complaint in found.complaints:
            print(f"pdsl: {complaint}", file=sys.stderr)
        points = found.points
        given = {**asdict(found.step), **asdict(found.setting), **given}
    elif graph is not None:
        given = {**_of_graph(graph, agents), **given}
    a = answer(given, points)
    for name in [name for name in a["estimated"] if options[name] is not None]:
        del a["estimated"][name]
    if as_json:
        print(json.dumps(finite_only(a)))
    else:
        Console(markup=False, emoji=False, highlight=False).print(table(a))
