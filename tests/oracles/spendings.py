"""Random things to account for, and other accountants to ask about them."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdsl.privacy.accounting import Mechanism, Spent
from tests.oracles.losses import Round

LEAST_DELTA_OF_OPACUS = 1e-9  # below, the rounding errors of its FFT are in its digits
LEAST_EPSILON_OF_OPACUS = 0.05  # below, the error in ε that it is allowed is
OPACUS_ERROR = 0.001


@dataclass(frozen=True)
class Point:
    """One question."""

    spent: Spent
    delta: float

    @property
    def rounds(self) -> list[Round]:
        """What was spent, as noise multipliers that are computed here: a record moves message n by Δ/σ_n of its σ."""
        found = []
        for m, rounds in self.spent:
            moved = math.hypot(*(m.sensitivity / sigma for sigma in m.sigmas))
            found.append((1 / moved, 1.0 if m.rate is None else m.rate, rounds * m.steps))
        return found


def draw(count: int, seed: int) -> Iterator[Point]:
    """One to three mechanisms, with and without sampling, one to five messages, some with a σ for each."""
    rng = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    for _ in range(count):
        spent = []
        for _ in range(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15])):
            sampled = rng.random() < 0.75
            rate = between(0.002, 0.95) if sampled else (None, 1.0)[rng.integers(2)]
            steps = int(rng.integers(1, 4)) if rng.random() < 0.3 else 1
            messages = int(rng.integers(1, 6))
            z, sensitivity = between(*((0.5, 20) if sampled else (2, 100))), between(0.01, 10)
            m = Mechanism.from_noise_multiplier(z, sensitivity, messages, steps, rate)
            if rng.random() < 0.3:
                factors = tuple(between(0.7, 1.5) for _ in range(messages))
                m = Mechanism(m.sigma, sensitivity, messages, steps, rate, sigma_scale=factors)
            spent.append((m, round(between(1, 2000))))
        small = rng.random() < 0.2
        yield Point(tuple(spent), 10 ** rng.uniform(*((-13.5, -10) if small else (-10, -2))))


def opacus_epsilon(rounds: list[Round], delta: float, about: float) -> float | None:
    """What Opacus's PRV accountant estimates, where it gives an answer; `about` sets how fine its grid is.

    It states the estimate at δ minus an error, plus an error in ε; the latter is taken off again. It looks at a record
    removed only.
    """
    from opacus.accountants import PRVAccountant  # type: ignore[import-not-found, unused-ignore]

    if delta < LEAST_DELTA_OF_OPACUS or about < LEAST_EPSILON_OF_OPACUS:
        return None
    error = OPACUS_ERROR * max(2 * about, 1)
    accountant = PRVAccountant()
    accountant.history = [(z, q, n) for z, q, n in rounds]
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            return float(accountant.get_epsilon(delta, eps_error=error, delta_error=delta * 1e-4)) - error
    except (RuntimeError, ValueError):  # where it finds its own grid too coarse
        return None
