"""Privacy planning: the noise for a target ε, or the ε of a given noise, before a run."""

import math
from dataclasses import dataclass

from pydantic import Field, ValidationError

from pdsl.data.sampling import Batches
from pdsl.privacy.accounting import (
    Mechanism,
    analytic_sigma,
    calibrate,
    classic_sigma,
    epsilon,
    epsilon_at,
    epsilon_rdp,
)
from pdsl.privacy.calibration import theorem1_sigma
from pdsl.privacy.noise import sensitivity
from pdsl.section import Section
from pdsl.settings import BatchSettings, GraphSettings, PrivacySettings
from pdsl.topology import Graph, build
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

MAX_CURVE_POINTS = 50
UNDETERMINED_GRAPHS = ("k-regular", "erdos-renyi", "small-world", "file", "python")  # need a seed, a file or an object

# Bound → the σ it gives, with which one round is (epsilon_per_round, δ)-private.
BOUNDS = {
    "theorem1": "the paper's Theorem 1, for the aggregate ḡ, which is never sent; whole batch clipped",
    "classic_per_message": "one message alone, whole batch clipped, classic bound",
    "analytic_per_message": "one message alone, whole batch clipped, exact bound",
    "joint": "all k messages of a round, whole batch clipped, exact bound",
    "joint_per_sample": "all k messages of a round, each record clipped, exact bound, no amplification",
}

# Adversary → the messages it sees. All get the total ε, because no smaller one can be certified.
ADVERSARIES = {
    "one_message": "one intercepted message: a model or momentum, which depends on all rounds so far",
    "one_neighbour": "all messages sent to it; the agent's other messages reach it through the mixed models",
    "all_neighbours": "every message of the agent in all rounds: its neighbours collude",
    "outsider": "the final models, which depend on every message",
}


@dataclass(frozen=True)
class PrivacyPlan:
    """Noise and privacy of a planned run. The fields are those of `pdsl privacy --json`."""

    epsilon: float  # total, of all rounds
    delta: float
    rounds: int
    epsilon_per_round: float
    epsilon_rdp: float  # total, by Rényi DP: a looser bound
    noise_multiplier: float  # σ/(√k·Δ)
    sigma: float | None  # of each message; None if Δ is unknown
    sensitivity: float | None  # Δ; None if it depends on a batch size that is not given
    k: int  # messages per round
    graph: str | None
    sampler: str
    sample_rate: float | None  # None with fixed-size batches
    adjacency: str
    clipping: str
    max_grad_norm: float
    adversaries: dict[str, JsonDict]  # see ADVERSARIES
    bounds: dict[str, float | None]  # σ for one round, see BOUNDS; None if a bound does not apply
    curve: list[list[float]]  # pairs of a round and the total ε after it


class _Settings(Section):
    rounds: int = Field(ge=1)
    graph: GraphSettings
    batch: BatchSettings
    privacy: PrivacySettings


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
) -> PrivacyPlan:
    """Plan the noise and privacy of a run, for an agent with the largest neighbourhood.

    Guarantee: `epsilon` is `accounting.epsilon` of all rounds.

    | not given                       | result                                                                |
    |---------------------------------|-----------------------------------------------------------------------|
    | graph (but k)                   | bounds["theorem1"] is None, because it needs W                        |
    | batch, and samples or rate      | per-sample Δ is unknown: sigma and bounds["joint_per_sample"] are None|
    | phi_min                         | Theorem 1 with equal shares 1/k, which needs the least noise          |
    """
    if rounds is None:
        raise PdslError("privacy: rounds are missing, and every round spends privacy; try --rounds 200")
    settings = _validate(
        rounds=rounds,
        graph={"kind": graph, "agents": agents},
        batch={"size": batch, "sampler": sampler},
        privacy={"clipping": clipping, "max_grad_norm": max_grad_norm, "delta": delta, "phi_min": phi_min},
    )
    network, k = _neighbourhood(settings.graph, graph, agents, k)
    rate = _rate(sampler, samples, batch, sample_rate)
    if batch is None and samples is not None and sample_rate is not None:
        batch = max(1, round(sample_rate * samples))
    sensitivities = {c: _sensitivity(settings, c, batch, samples, rate) for c in ("per-sample", "batch")}
    z = _noise_multiplier(target_epsilon, noise_multiplier, sigma, settings, rate, sensitivities[clipping], k)
    mechanism = Mechanism.from_noise_multiplier(z, sensitivities[clipping] or 1.0, k, rate=rate)
    one_round = epsilon(((mechanism, 1),), delta)
    total = epsilon(((mechanism, rounds),), delta)
    at = sorted({math.ceil(rounds * i / MAX_CURVE_POINTS) for i in range(1, MAX_CURVE_POINTS + 1)})
    return PrivacyPlan(
        epsilon=total,
        delta=delta,
        rounds=rounds,
        epsilon_per_round=one_round,
        epsilon_rdp=epsilon_rdp(((mechanism, rounds),), delta),
        noise_multiplier=z,
        sigma=None if sensitivities[clipping] is None else mechanism.sigma,
        sensitivity=sensitivities[clipping],
        k=k,
        graph=None if network is None else network.describe(),
        sampler=sampler,
        sample_rate=rate,
        adjacency="replace one record" if rate is None else "add or remove one record",
        clipping=clipping,
        max_grad_norm=max_grad_norm,
        adversaries={name: {"epsilon": total, "sees": sees} for name, sees in ADVERSARIES.items()},
        bounds=_bounds(settings.privacy, network, k, sensitivities, one_round),
        curve=[[t, e] for t, e in zip(at, epsilon_at(mechanism, at, delta), strict=True)],
    )


def _validate(rounds: int, **sections: dict[str, object]) -> _Settings:
    """Validate the options like the settings of a run; missing options take their defaults."""
    given = {name: {key: v for key, v in section.items() if v is not None} for name, section in sections.items()}
    try:
        return _Settings.model_validate({"rounds": rounds, **given})
    except ValidationError as e:
        error = e.errors()[0]
        key = ".".join(map(str, error["loc"]))
        raise PdslError(f"privacy: {key}={error['input']}: {error['msg']}; 'pdsl config' lists what is allowed") from e


def _noise_multiplier(
    target_epsilon: float | None,
    noise_multiplier: float | None,
    sigma: float | None,
    settings: _Settings,
    rate: float | None,
    sensitivity: float | None,
    k: int,
) -> float:
    """Noise multiplier from the one of target_epsilon, noise_multiplier and sigma that is given."""
    options = {"target_epsilon": target_epsilon, "noise_multiplier": noise_multiplier, "sigma": sigma}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise PdslError(
            "privacy: exactly one of target_epsilon, noise_multiplier, sigma is needed (given:"
            f" {', '.join(given) or 'none'}); try --target-epsilon 1"
        )
    if target_epsilon is not None:
        z = calibrate(target_epsilon, settings.privacy.delta, settings.rounds, rate)
    elif noise_multiplier is not None:
        z = noise_multiplier
    elif sensitivity is None:
        raise PdslError(f"privacy: sigma={sigma} has no ε without the batch size; try --batch 250")
    else:
        z = Mechanism(sigma or 0.0, sensitivity, k).noise_multiplier
    if not 0 < z < math.inf:
        raise PdslError(f"privacy: {given[0]}={options[given[0]]} must be above 0, or ε is infinite; try 1")
    return z


def _neighbourhood(
    settings: GraphSettings, graph: str | None, agents: int | None, k: int | None
) -> tuple[Graph | None, int]:
    """The graph, if it is known, and its largest neighbourhood |M_i|."""
    if k is not None:
        if graph is not None or agents is not None:
            raise PdslError(f"privacy: k={k} and a graph are both given, but the graph determines k; leave out --k")
        if k < 1:
            raise PdslError(f"privacy: k={k} must be 1 or more; try the size of the largest neighbourhood")
        return None, k
    if graph is None or agents is None:
        raise PdslError("privacy: k, the messages per round, is unknown; try --graph ring --agents 10, or --k 3")
    if graph in UNDETERMINED_GRAPHS:
        raise PdslError(f"privacy: graph={graph} has no k until it is drawn or read; try --k, its largest |M_i|")
    network = build(settings, Streams(0))
    return network, network.max_members


def _rate(sampler: str, samples: int | None, batch: int | None, sample_rate: float | None) -> float | None:
    """Poisson rate q; None with fixed-size batches."""
    if samples is not None and samples < 1:
        raise PdslError(f"privacy: samples={samples} must be 1 or more; try the number of records of one agent")
    if sampler == "fixed":
        if sample_rate is not None:
            raise PdslError(
                f"privacy: sample_rate={sample_rate} and sampler=fixed: fixed-size batches are not amplified;"
                " try --sampler poisson, or leave out --sample-rate"
            )
        return None
    if sample_rate is not None:
        if samples is not None and batch is not None:
            raise PdslError(
                f"privacy: sample_rate={sample_rate} also follows from batch={batch}, samples={samples}; leave one out"
            )
        if not 0 < sample_rate <= 1:
            raise PdslError(f"privacy: sample_rate={sample_rate} must be above 0 and at most 1; try batch / samples")
        return sample_rate
    if samples is None or batch is None:
        raise PdslError(
            "privacy: the sampling rate is unknown; try --samples 6000 --batch 250, --sample-rate 0.04, or"
            " --sampler fixed"
        )
    return _batches(sampler, batch, samples).rate


def _batches(sampler: str, batch: int, samples: int) -> Batches:
    return Batches([samples], BatchSettings.model_validate({"size": batch, "sampler": sampler}), Streams(0), samples)


def _sensitivity(
    settings: _Settings, clipping: str, batch: int | None, samples: int | None, rate: float | None
) -> float | None:
    """Δ of one message; None if it depends on an unknown batch size."""
    if clipping == "per-sample" and batch is None:
        return None
    size = batch or 1
    records = samples or math.ceil(size / (rate or 1.0))
    privacy = settings.privacy.model_copy(update={"clipping": clipping})
    return sensitivity(privacy, _batches(settings.batch.sampler, size, records), 0)


def _bounds(
    privacy: PrivacySettings, network: Graph | None, k: int, sensitivities: dict[str, float | None], one_round: float
) -> dict[str, float | None]:
    """σ by bound, see BOUNDS; None if a bound does not apply."""
    if not 0 < one_round < math.inf:
        return dict.fromkeys(BOUNDS)
    exact = analytic_sigma(one_round, privacy.delta)
    whole, each = sensitivities["batch"] or 0.0, sensitivities["per-sample"]
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
