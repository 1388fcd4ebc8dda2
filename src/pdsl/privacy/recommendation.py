"""Recommended batch, rounds, clipping and learning rate for a privacy budget.

The noise that a run leaves in its model is z/(q√T), for a noise multiplier z, a sampling rate q and T rounds (per unit
of clipping norm and record). At a given ε it falls with q and hardly depends on T, so large batches are the cheapest
accuracy there is: take as many rounds as training needs, then the largest batches that the computing budget allows.
"""

import math
from dataclasses import dataclass

from pdsl.privacy.accounting import calibrate
from pdsl.utils.errors import PdslError

CONVEX_ROUNDS = 40  # that one layer of weights needs with full batches
DEEP_ROUNDS = 60  # and a network
RATES = (1 / 24, 1 / 8, 1 / 3, 1.0)  # sampling rates that are shown for comparison
MIN_BATCH = 8  # records; smaller batches are mostly noise


@dataclass(frozen=True)
class Choice:
    """Sampling rate and rounds, with the noise that they leave."""

    rate: float
    batch: int
    rounds: int
    noise_multiplier: float

    @property
    def noise(self) -> float:
        """z/(q√T)."""
        return self.noise_multiplier / (self.rate * math.sqrt(self.rounds))


@dataclass(frozen=True)
class Recommendation:
    """Settings for a run, and the noise of other batch sizes with as many rounds."""

    chosen: Choice
    others: tuple[Choice, ...]
    target_epsilon: float
    delta: float
    gradients: float  # per-record gradients that an agent computes in the run
    max_grad_norm: float = 1.0
    learning_rate: str = "auto"
    momentum: float = 0.5

    def assignments(self) -> list[str]:
        """The settings as arguments of --set."""
        c = self.chosen
        return [
            f"rounds={c.rounds}",
            f"batch.size={c.batch}",
            f"privacy.target_epsilon={self.target_epsilon:g}",
            f"privacy.delta={self.delta:g}",
            f"privacy.max_grad_norm={self.max_grad_norm:g}",
            f"algorithm.learning_rate={self.learning_rate}",
        ]


def recommend(
    *,
    records: int,
    target_epsilon: float,
    delta: float = 1e-5,
    members: int = 1,
    deep: bool = False,
    gradients: float | None = None,
) -> Recommendation:
    """Recommend settings for agents with so many records each.

    Args:
        records: records of an average agent.
        target_epsilon: total ε of the whole run.
        delta: δ.
        members: neighbourhood |M_i| of an agent, itself included: it computes a gradient for each of them.
        deep: whether the model has several layers of weights.
        gradients: computing budget: per-record gradients per agent in the whole run. Default: enough for full batches.
    """
    for name, value in (("records", records), ("target_epsilon", target_epsilon), ("members", members)):
        if not value > 0:  # nor NaN
            raise PdslError(f"privacy: {name}={value} must be above 0")
    if not 0 < delta < 1:
        raise PdslError(f"privacy: delta={delta} must be between 0 and 1; try 1e-5")
    rounds = DEEP_ROUNDS if deep else CONVEX_ROUNDS
    batch = records
    if gradients is not None:
        if not 0 < gradients < math.inf:
            raise PdslError(f"privacy: gradients={gradients:g} must be above 0; try {records * members * rounds}")
        smallest, affordable = min(MIN_BATCH, records), math.floor(gradients / members)  # records, of all rounds
        rounds = max(1, min(rounds, affordable // smallest))
        batch = max(smallest, min(records, affordable // rounds))
    chosen = _choose(records, batch, rounds, target_epsilon, delta)
    sizes = dict.fromkeys(round(rate * records) for rate in RATES)
    others = tuple(_choose(records, size, rounds, target_epsilon, delta) for size in sizes if size not in (0, batch))
    return Recommendation(chosen, others, target_epsilon, delta, batch * members * rounds)


def _choose(records: int, batch: int, rounds: int, target_epsilon: float, delta: float) -> Choice:
    rate = batch / records
    return Choice(rate, batch, rounds, calibrate(target_epsilon, delta, rounds, rate))
