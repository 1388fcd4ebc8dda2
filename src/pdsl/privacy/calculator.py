"""`pdsl privacy`: how much noise for an ε, or which ε for a noise, before anything is trained."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdsl.errors import PdslError
from pdsl.rounded import rounded_up

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.config import Config
    from pdsl.data.batches import Batches
    from pdsl.graph import Graph

CURVE = 50  # points at most
WHERE = "privacy"
NOT_FIXED = ("k-regular", "erdos-renyi", "small-world", "file", "python")  # graphs that a name and a size do not fix

# σ with which each way of reasoning makes one round (epsilon_per_round, δ)-private, by name.
BOUNDS = {
    "theorem1": "the paper's Theorem 1, about ḡ, which is never sent; batch clipped as a whole",
    "classic_per_message": "one message alone, batch clipped as a whole, classic bound",
    "analytic_per_message": "one message alone, batch clipped as a whole, exact bound",
    "joint": "all k messages of a round, batch clipped as a whole, exact bound",
    "joint_per_sample": "all k messages of a round, each record clipped, exact bound, no amplification",
}

# What each adversary sees, by name. All get the number of the strongest: no smaller ε can be certified.
ADVERSARIES = {
    "one_message": "one message that crosses an edge, intercepted: a model or momentum, which holds all rounds so far",
    "one_neighbour": "all that it is sent; the agent's other messages reach it through the models that all mix",
    "all_neighbours": "every message of the agent in all rounds: its neighbours collude",
    "outsider": "the final models, into which every message went",
}


def plan(
    *,
    rounds: int | None = None,
    graph: str | None = None,
    agents: int | None = None,
    k: int | None = None,
    samples: int | None = None,
    batch: int | None = None,
    sample_rate: float | None = None,
    sampler: str = "poisson",
    clipping: str = "per-sample",
    max_grad_norm: float = 1.0,
    delta: float = 1e-5,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sigma: float | None = None,
    phi_min: float | None = None,
) -> dict[str, Any]:
    """Noise and privacy of a run that is planned; the table of `pdsl privacy` as data.

    Guarantee: `epsilon` is `accounting.epsilon` of all rounds, for an agent with the largest neighbourhood.

    | not given                     | result                                                               |
    |-------------------------------|----------------------------------------------------------------------|
    | graph (but k)                 | bounds.theorem1 is None: it needs W                                  |
    | batch, nor samples with rate  | per-sample Δ is unknown: sigma and bounds.joint_per_sample are None  |
    | phi_min                       | Theorem 1 with equal shares, 1/k: the least noise it can ask for     |
    """
    from pdsl.privacy.accounting import Mechanism, calibrate, epsilon, epsilon_at, epsilon_rdp

    config = _settings(rounds, graph, agents, batch, sampler, clipping, max_grad_norm, delta, phi_min)
    network, k = _neighbourhood(config, graph, agents, k)
    rate = _rate(sampler, samples, batch, sample_rate)
    if batch is None and samples is not None and sample_rate is not None:
        batch = max(1, round(sample_rate * samples))
    known = {c: _sensitivity(config, c, batch, samples, rate) for c in ("per-sample", "batch")}
    sensitivity = known[clipping]

    given = {"target_epsilon": target_epsilon, "noise_multiplier": noise_multiplier, "sigma": sigma}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise PdslError(
            f"{WHERE}: exactly one of target_epsilon, noise_multiplier, sigma is needed (given:"
            f" {', '.join(names) or 'none'}); try --target-epsilon 1"
        )
    if target_epsilon is not None:
        z = calibrate(target_epsilon, delta, config.rounds, rate)
    elif noise_multiplier is not None:
        z = noise_multiplier
    elif sensitivity is None:
        raise PdslError(f"{WHERE}: sigma={sigma} says nothing without the batch it is added to; try --batch 250")
    else:
        z = Mechanism(sigma or 0.0, sensitivity, k).noise_multiplier
    if not 0 < z < math.inf:
        raise PdslError(f"{WHERE}: {names[0]}={given[names[0]]} must be above 0, or ε is infinite; try 1")

    mechanism = Mechanism.from_noise_multiplier(z, sensitivity or 1.0, k, rate=rate)
    one_round = epsilon(((mechanism, 1),), delta)
    total = epsilon(((mechanism, config.rounds),), delta)
    at = sorted({math.ceil(config.rounds * i / CURVE) for i in range(1, CURVE + 1)})
    return {
        "epsilon": total,
        "delta": delta,
        "rounds": config.rounds,
        "epsilon_per_round": one_round,
        "epsilon_rdp": epsilon_rdp(((mechanism, config.rounds),), delta),
        "noise_multiplier": z,
        "sigma": None if sensitivity is None else mechanism.sigma,
        "sensitivity": sensitivity,
        "k": k,
        "graph": None if network is None else network.describe(),
        "sampler": sampler,
        "sample_rate": rate,
        "adjacency": "replace one record" if rate is None else "add or remove one record",
        "clipping": clipping,
        "max_grad_norm": max_grad_norm,
        "adversaries": {name: {"epsilon": total, "sees": sees} for name, sees in ADVERSARIES.items()},
        "bounds": _bounds(config, network, k, known, one_round),
        "curve": [[t, e] for t, e in zip(at, epsilon_at(mechanism, at, delta), strict=True)],
    }


def _settings(
    rounds: int | None,
    graph: str | None,
    agents: int | None,
    batch: int | None,
    sampler: str,
    clipping: str,
    max_grad_norm: float,
    delta: float,
    phi_min: float | None,
) -> "Config":
    """What a run would be told, validated as a run's settings are."""
    from pdsl.config import validated

    if rounds is None:
        raise PdslError(f"{WHERE}: rounds are missing, and every round spends; try --rounds 200")
    sections: dict[str, dict[str, Any]] = {
        "graph": {"kind": graph, "agents": agents},
        "batch": {"size": batch, "sampler": sampler},
        "privacy": {"clipping": clipping, "max_grad_norm": max_grad_norm, "delta": delta, "phi_min": phi_min},
    }
    given = {name: {key: v for key, v in section.items() if v is not None} for name, section in sections.items()}
    return validated({"rounds": rounds, **given}, WHERE)


def _neighbourhood(
    config: "Config", graph: str | None, agents: int | None, k: int | None
) -> tuple["Graph | None", int]:
    """The graph, where it is known, and its largest |M_i|."""
    from pdsl.graph import build
    from pdsl.randomness import Streams

    if k is not None:
        if graph is not None or agents is not None:
            raise PdslError(f"{WHERE}: k={k} and a graph are both given, and the graph decides k; leave out --k")
        if k < 1:
            raise PdslError(f"{WHERE}: k={k} must be 1 or more; try the members of the largest neighbourhood")
        return None, k
    if graph is None or agents is None:
        raise PdslError(f"{WHERE}: k, the messages of a round, is unknown; try --graph ring --agents 10, or --k 3")
    if graph in NOT_FIXED:
        raise PdslError(f"{WHERE}: graph={graph} has no k before it is drawn or read; try --k, its largest |M_i|")
    network = build(config.graph, Streams(0))
    return network, int(max(network.degrees))


def _rate(sampler: str, samples: int | None, batch: int | None, sample_rate: float | None) -> float | None:
    """The Poisson rate q; None with batches of a fixed size."""
    if samples is not None and samples < 1:
        raise PdslError(f"{WHERE}: samples={samples} must be 1 or more; try the records of one agent")
    if sampler == "fixed":
        if sample_rate is not None:
            raise PdslError(
                f"{WHERE}: sample_rate={sample_rate} and sampler=fixed: batches of a fixed size are not amplified;"
                " try --sampler poisson, or leave out --sample-rate"
            )
        return None
    if sample_rate is not None:
        if samples is not None and batch is not None:
            raise PdslError(
                f"{WHERE}: sample_rate={sample_rate}, batch={batch} and samples={samples} say it twice; leave one out"
            )
        if not 0 < sample_rate <= 1:
            raise PdslError(f"{WHERE}: sample_rate={sample_rate} must be above 0 and at most 1; try batch / samples")
        return sample_rate
    if samples is None or batch is None:
        raise PdslError(
            f"{WHERE}: the rate at which records are sampled is unknown; try --samples 6000 --batch 250,"
            " --sample-rate 0.04, or --sampler fixed"
        )
    return _batches(sampler, batch, samples).rate


def _batches(sampler: str, batch: int, samples: int) -> "Batches":
    from pdsl.data.batches import Batches
    from pdsl.randomness import Streams
    from pdsl.settings import BatchSettings

    return Batches([samples], BatchSettings.model_validate({"size": batch, "sampler": sampler}), Streams(0), samples)


def _sensitivity(
    config: "Config", clipping: str, batch: int | None, samples: int | None, rate: float | None
) -> float | None:
    """Δ of one message; None where it takes a batch that is not known."""
    from pdsl.privacy.mechanism import sensitivity

    if clipping == "per-sample" and batch is None:
        return None
    size = batch or 1
    records = samples or math.ceil(size / (rate or 1.0))
    settings = config.privacy.model_copy(update={"clipping": clipping})
    return sensitivity(settings, _batches(config.batch.sampler, size, records), 0)


def _bounds(
    config: "Config", network: "Graph | None", k: int, known: dict[str, float | None], one_round: float
) -> dict[str, float | None]:
    """σ by name, see BOUNDS; None where a bound does not exist."""
    from pdsl.privacy.accounting import analytic_sigma, classic_sigma
    from pdsl.privacy.theorem1 import theorem1_sigma

    if not 0 < one_round < math.inf:
        return dict.fromkeys(BOUNDS)
    privacy = config.privacy
    exact = analytic_sigma(one_round, privacy.delta)
    whole, each = known["batch"] or 0.0, known["per-sample"]
    phi_min = privacy.phi_min if privacy.phi_min is not None else 1 / k
    theorem1 = None
    if network is not None:
        theorem1 = theorem1_sigma(network, one_round, privacy.delta, privacy.max_grad_norm, phi_min)
    return {
        "theorem1": theorem1,
        "classic_per_message": classic_sigma(one_round, privacy.delta) * whole if one_round <= 1 else None,
        "analytic_per_message": exact * whole,
        "joint": exact * math.sqrt(k) * whole,
        "joint_per_sample": None if each is None else exact * math.sqrt(k) * each,
    }


def table(plan: dict[str, Any]) -> "Table":
    """A plan for people: the total first, then one round, then what the paper and others would ask for."""
    from rich.table import Table

    p = plan
    sampling = f"poisson, rate {p['sample_rate']:.4g}" if p["sample_rate"] else "fixed size, no amplification"
    members = f"{p['k']} ({p['graph']})" if p["graph"] else str(p["k"])
    shown = Table(show_header=False, title=f"privacy of {p['rounds']:,} rounds", title_justify="left")
    shown.add_row("[bold]total ε[/]", f"[bold]{rounded_up(p['epsilon'])}[/] at δ = {p['delta']:g}")
    shown.add_row("neighbouring data", p["adjacency"])
    shown.add_row("batches", sampling)
    shown.add_row("messages a round, k", members)
    shown.add_row("noise multiplier σ/(√k·Δ)", f"{p['noise_multiplier']:.4g}")
    if p["sigma"] is None:
        shown.add_row("σ of a message", "unknown: Δ takes a batch; try --batch")
    else:
        shown.add_row("σ of a message", f"{p['sigma']:.4g} ({p['clipping']} clipping, Δ = {p['sensitivity']:.4g})")
    shown.add_row("total ε by RDP, a looser bound", rounded_up(p["epsilon_rdp"]))
    shown.add_section()
    for name, adversary in p["adversaries"].items():
        shown.add_row(f"ε, {name.replace('_', ' ')}", f"{rounded_up(adversary['epsilon'])}: sees {adversary['sees']}")
    shown.add_section()
    shown.add_row("ε of one round", f"{rounded_up(p['epsilon_per_round'])}; σ for it, by other bounds:")
    for name, text in BOUNDS.items():
        bound = p["bounds"][name]
        shown.add_row(f"  {name.replace('_', ' ')}", f"{'—' if bound is None else f'{bound:.4g}'}: {text}")
    return shown


def command(
    rounds: Annotated[int | None, typer.Option(help="Rounds T.")] = None,
    graph: Annotated[str | None, typer.Option(help="Topology, like ring or full; with --agents it gives k.")] = None,
    agents: Annotated[int | None, typer.Option(help="Agents on the graph.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Messages of a round, instead of a graph.")] = None,
    samples: Annotated[int | None, typer.Option(help="Records of an agent.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size B.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Poisson rate q, instead of B / samples.")] = None,
    sampler: Annotated[str, typer.Option(help="poisson or fixed.")] = "poisson",
    clipping: Annotated[str, typer.Option(help="per-sample, or batch as in the paper.")] = "per-sample",
    max_grad_norm: Annotated[float, typer.Option(help="Clipping threshold C.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ.")] = 1e-5,
    target_epsilon: Annotated[float | None, typer.Option(help="Total ε that all rounds may spend.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ/(√k·Δ).")] = None,
    sigma: Annotated[float | None, typer.Option(help="Standard deviation of the noise on each message.")] = None,
    phi_min: Annotated[float | None, typer.Option(help="Least share φ̂_min in Theorem 1; default 1/k.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """How much noise for an ε, or which ε for a noise: give --target-epsilon, --noise-multiplier or --sigma."""
    from rich.console import Console

    answer = plan(
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
        print(json.dumps(finite_only(answer)))
    else:
        Console().print(table(answer), highlight=False)


def finite_only(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {key: finite_only(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite_only(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
