"""`pdsl privacy`: the noise for a target ε, or the ε of a given noise, before anything is trained."""

import json
import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.privacy.planning import PrivacyPlan
    from pdsl.privacy.recommendation import Recommendation


def table(plan: "PrivacyPlan") -> "Table":
    """A plan as a table: the total first, then one round, then σ by other bounds."""
    from rich.table import Table

    from pdsl.privacy.planning import BOUNDS
    from pdsl.utils.format import format_epsilon

    sampling = f"poisson, rate {plan.sample_rate:.4g}" if plan.sample_rate else "fixed size, no amplification"
    rows = Table(show_header=False, title=f"privacy of {plan.rounds:,} rounds", title_justify="left")
    rows.add_row("[bold]total ε[/]", f"[bold]{format_epsilon(plan.epsilon)}[/] at δ = {plan.delta:g}")
    rows.add_row("neighbouring data", plan.adjacency)
    rows.add_row("batches", sampling)
    rows.add_row("messages per round, k", f"{plan.k} ({plan.graph})" if plan.graph else str(plan.k))
    rows.add_row("noise multiplier σ/(√k·Δ)", f"{plan.noise_multiplier:.4g}")
    if plan.sigma is None:
        rows.add_row("σ of a message", "unknown, because Δ depends on the batch size; try --batch")
    else:
        rows.add_row("σ of a message", f"{plan.sigma:.4g} ({plan.clipping} clipping, Δ = {plan.sensitivity:.4g})")
    rows.add_row("total ε by RDP, a looser bound", format_epsilon(plan.epsilon_rdp))
    rows.add_section()
    for name, adversary in plan.adversaries.items():
        total = format_epsilon(adversary["epsilon"])
        rows.add_row(f"ε, {name.replace('_', ' ')}", f"{total}: sees {adversary['sees']}")
    rows.add_section()
    rows.add_row("ε of one round", f"{format_epsilon(plan.epsilon_per_round)}; σ for it, by other bounds:")
    for name, text in BOUNDS.items():
        bound = plan.bounds[name]
        rows.add_row(f"  {name.replace('_', ' ')}", f"{'—' if bound is None else f'{bound:.4g}'}: {text}")
    return rows


def command(
    rounds: Annotated[int | None, typer.Option(help="Rounds T.")] = None,
    graph: Annotated[str | None, typer.Option(help="Topology, like ring or full; with --agents it gives k.")] = None,
    agents: Annotated[int | None, typer.Option(help="Number of agents.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Messages per round, instead of a graph.")] = None,
    samples: Annotated[int | None, typer.Option(help="Number of records of one agent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size B.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Poisson sampling rate q, instead of B / samples.")] = None,
    sampler: Annotated[str, typer.Option(help="poisson or fixed.")] = "poisson",
    clipping: Annotated[str, typer.Option(help="per-sample, or batch (as in the paper).")] = "per-sample",
    max_grad_norm: Annotated[float, typer.Option(help="Clipping threshold C.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    target_epsilon: Annotated[float | None, typer.Option(help="Total ε that all rounds may spend.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ/(√k·Δ).")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the noise on each message.")] = None,
    phi_min: Annotated[
        float | None, typer.Option(help="Smallest share φ̂_min in Theorem 1; default 1/k (a run: λ/k).")
    ] = None,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Recommend batch and rounds for --samples and --target-epsilon.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="--recommend: the model has several layers of weights.")] = False,
    gradients: Annotated[
        float | None,
        typer.Option(help="--recommend: limit of per-record gradients per agent in the run; default: enough."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Plan noise and privacy of a run, without data.

    Needs --rounds; --graph and --agents, or --k; --samples and --batch, or --sample-rate;
    and one of --target-epsilon, --noise-multiplier, --sigma. With --recommend: --samples and --target-epsilon.
    """
    from rich.console import Console

    from pdsl.privacy.planning import plan

    if recommend:
        advice = _recommend(samples, target_epsilon, delta, graph, agents, k, deep, gradients)
        topology = [] if graph is None or agents is None else [f"graph.kind={graph}", f"graph.agents={agents}"]
        assignments = topology + advice.assignments()
        if as_json:
            print(json.dumps(asdict(advice) | {"assignments": assignments}))
        else:
            Console().print(_advice_table(advice), highlight=False)
            print("The command, to which you add your data, like --set data.path=records.csv:")
            print(shlex.join(["pdsl", "run", *(word for text in assignments for word in ("--set", text))]))
        return
    found = plan(
        rounds=rounds,
        graph=graph,
        agents=agents,
        k=k,
        samples=samples,
        batch=batch,
        sample_rate=sample_rate,
        sampler=sampler,
        clipping=clipping,
        max_grad_norm=max_grad_norm,
        delta=delta,
        target_epsilon=target_epsilon,
        noise_multiplier=noise_multiplier,
        sigma=sigma,
        phi_min=phi_min,
    )
    if as_json:
        print(json.dumps(finite_only(asdict(found))))
    else:
        Console().print(table(found), highlight=False)


def _recommend(
    samples: int | None,
    target_epsilon: float | None,
    delta: float,
    graph: str | None,
    agents: int | None,
    k: int | None,
    deep: bool,
    gradients: float | None,
) -> "Recommendation":
    from pdsl.privacy.recommendation import recommend
    from pdsl.settings import GraphSettings
    from pdsl.topology import build
    from pdsl.utils.errors import PdslError
    from pdsl.utils.random import Streams

    if samples is None or target_epsilon is None:
        raise PdslError("privacy --recommend: records and ε are missing; try --samples 6000 --target-epsilon 4")
    if (graph is None) != (agents is None):
        raise PdslError("privacy --recommend: --graph and --agents belong together; give both, or --k")
    members = 1 if k is None else k
    if graph is not None:
        members = build(GraphSettings.build("graph", {"kind": graph, "agents": agents}), Streams(0)).max_members
    return recommend(
        records=samples, target_epsilon=target_epsilon, delta=delta, members=members, deep=deep, gradients=gradients
    )


def _advice_table(advice: "Recommendation") -> "Table":
    from rich.table import Table

    c = advice.chosen
    title = f"recommended for total ε = {advice.target_epsilon:g}: {c.rounds} rounds, batches of {c.batch:,}"
    rows = Table("", "batch", "sampling rate q", "z", "noise z/(q√T)", title=title, title_justify="left")
    for choice in sorted((c, *advice.others), key=lambda choice: choice.rate):
        mark = "recommended" if choice is c else ""
        z, noise = f"{choice.noise_multiplier:.3g}", f"{choice.noise:.3g}"
        rows.add_row(mark, f"{choice.batch:,}", f"{choice.rate:.3g}", z, noise)
    rows.caption = (
        f"An agent computes {advice.gradients:,.0f} per-record gradients. Clipping norm {advice.max_grad_norm:g},"
        f" learning rate {advice.learning_rate}, momentum {advice.momentum:g}."
    )
    return rows


def finite_only(value: Any) -> Any:
    """Replace infinite numbers by None, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite_only(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite_only(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
