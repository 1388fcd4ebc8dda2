"""Theorem 2 (conditions on γ, bound) and Corollary 1 (number of rounds), as the paper states them.

The bound is on the mean over rounds of E‖∇F(x̄)‖², where F is the mean of the agents' losses and x̄ the mean of their
models. No γ meets all conditions, as docs/theory.md shows; these functions evaluate them literally.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

POSITIVE_DESCENT = "descent"
BOUNDED_DISAGREEMENT = "disagreement"
ABSORBED_GRADIENTS = "absorption"
CONNECTED = "connectivity"


@dataclass(frozen=True)
class Step:
    """Constants of the conditions."""

    gamma: float  # learning rate γ > 0
    alpha: float  # momentum, 0 < α < 1
    L: float  # smoothness of every f_i, Assumption 1, > 0
    rho: float  # max(|λ_2|, |λ_M|)² of W, Assumption 3, 0 ≤ ρ ≤ 1

    @property
    def gap(self) -> float:
        """1 − √ρ, the spectral gap of W."""
        return 1 - math.sqrt(self.rho)


@dataclass(frozen=True)
class Setting:
    """Further constants of the bound."""

    C: float  # clipping threshold
    sigma: float  # standard deviation of the noise on a message
    d: int  # number of parameters
    zeta: float  # E‖∇F_i(x; ξ) − ∇f_i(x)‖² ≤ ζ², Assumption 2
    kappa: float  # ‖∇f_i(x) − ∇F(x)‖² ≤ κ², Assumption 2
    omega_min: float  # smallest positive entry of W
    agents: int  # M
    rounds: int  # T
    excess: float  # F(x̄⁰) − F*


@dataclass(frozen=True)
class Condition:
    """A condition: the requirement, the value and its limit, whether it holds, and its origin."""

    name: str
    requires: str
    value: float
    limit: float
    holds: bool
    why: str


def min_gamma(alpha: float) -> float:
    """Lower limit of γ: at or below it, m1 ≤ 0."""
    return (1 - alpha) ** 2 / alpha


def max_gamma_disagreement(s: Step) -> float:
    """Upper limit of γ in Lemma 6, which bounds the distance of the models from their mean."""
    return (1 - s.alpha) * s.gap / (2 * math.sqrt(26) * s.L)


def max_gamma_absorption(s: Step) -> float:
    """Upper limit of γ: the positive root of 1 − 2αγ/(1−α)² − 52L²γ²/((1−α)²(1−√ρ)²).

    This is the paper's α(1−√ρ)²/(52L²) · (−1 + √(1 + 52L²(1−α)²/(α²(1−√ρ)²))), rewritten to avoid cancellation for
    small L. It is less than (1−α)²/(2α) for all L and ρ.
    """
    return (
        (1 - s.alpha) ** 2
        * s.gap
        / (s.alpha * s.gap + math.hypot(s.alpha * s.gap, math.sqrt(52) * s.L * (1 - s.alpha)))
    )


def conditions(s: Step) -> list[Condition]:
    """Evaluate Assumption 3 and the three conditions on γ."""
    lower, disagreement, absorption = min_gamma(s.alpha), max_gamma_disagreement(s), max_gamma_absorption(s)
    return [
        Condition(CONNECTED, "ρ < 1", s.rho, 1.0, s.rho < 1, "Assumption 3: agents reach consensus"),
        Condition(
            POSITIVE_DESCENT, "γ > (1−α)²/α", s.gamma, lower, s.gamma > lower, "m1 > 0, which the bound divides by"
        ),
        Condition(
            BOUNDED_DISAGREEMENT,
            "γ ≤ (1−α)(1−√ρ)/(2√26·L)",
            s.gamma,
            disagreement,
            s.gamma <= disagreement,
            "Lemma 6: the models stay near their mean",
        ),
        Condition(
            ABSORBED_GRADIENTS,
            "γ ≤ α(1−√ρ)²/(52L²)·(√(1 + 52L²(1−α)²/(α²(1−√ρ)²)) − 1)",
            s.gamma,
            absorption,
            s.gamma <= absorption,
            "m6 ≥ 2m4 + 52γ²m5/((1−α)²(1−√ρ)²): the gradient terms cancel",
        ),
    ]


def multipliers(s: Step) -> dict[str, float]:
    """m1 … m5. If m1 is 0, the others are infinite."""
    gamma, alpha, L = s.gamma, s.alpha, s.L
    m1 = gamma / (2 * (1 - alpha)) - (1 - alpha) / (2 * alpha)
    over_m1 = 1 / m1 if m1 else math.inf
    return {
        "m1": m1,
        "m2": over_m1 * (alpha * L * gamma**2 / (2 * (1 - alpha) ** 3) + L * gamma**2 / (2 * (1 - alpha) ** 2)),
        "m3": over_m1 * L * (1 - alpha) / (2 * alpha),
        "m4": over_m1 * alpha * gamma**2 / (2 * (1 - alpha) ** 3),
        "m5": over_m1 * L**2 * gamma / (2 * (1 - alpha)),
    }


def formula(s: Step, v: Setting) -> dict[str, float]:
    """Right-hand side of the bound: its three terms and their sum. It is a bound only if all conditions hold.

    | case   | result                                         |
    |--------|------------------------------------------------|
    | m1 < 0 | all terms are negative, so there is no bound   |
    | m1 = 0 | infinite                                       |
    | ρ = 1  | the last term is infinite                      |
    """
    m = multipliers(s)
    momentum = m["m2"] + m["m3"] * (s.gamma * s.alpha) ** 2 / (1 - s.alpha) ** 4 + m["m4"]
    sent = (v.C**2 + v.sigma**2 * v.d) / v.omega_min**4
    spread = 16 * sent + 4 * (7 * v.zeta**2 + 13 * v.kappa**2)
    reach = (s.gamma / ((1 - s.alpha) * s.gap)) ** 2 if s.gap else math.inf
    terms = {
        "start": v.excess / (m["m1"] * v.rounds) if m["m1"] else math.inf,
        "messages": momentum * (4 * sent + 2 * v.zeta**2 / v.agents),
        "disagreement": m["m5"] * reach * spread,
    }
    return {**terms, "sum": sum(terms.values())}


def corollary_rounds(alpha: float, L: float, rho: float) -> Mapping[str, float]:
    """Corollary 1: the T at which γ = 1/√T meets each of the two upper limits. T must be at least the larger."""
    s = Step(1.0, alpha, L, rho)  # the limits do not depend on γ
    limits = {BOUNDED_DISAGREEMENT: max_gamma_disagreement(s), ABSORBED_GRADIENTS: max_gamma_absorption(s)}
    return {name: limit**-2 if limit else math.inf for name, limit in limits.items()}


def corollary_max_rounds(alpha: float) -> float:
    """With γ = 1/√T, m1 > 0 only for T below this; every T that Corollary 1 allows is more than four times as large."""
    return min_gamma(alpha) ** -2
