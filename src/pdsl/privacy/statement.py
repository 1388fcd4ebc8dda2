"""The privacy statement in words: the total first, with everything it depends on beside it."""

import math

from pdsl.privacy.accounting import Mechanism
from pdsl.privacy.ledger import Ledger
from pdsl.rounded import rounded_up
from pdsl.settings import PrivacySettings

SEEDED = "not private: seeded noise, for simulation only"


def statement(settings: PrivacySettings, ledger: Ledger | None, mechanisms: list[Mechanism] | None) -> str:
    """What may be said about a run, in a sentence or three."""
    if ledger is None or mechanisms is None:
        return "none: messages carry no noise, and no ε holds"
    worst = max(ledger.epsilon_per_agent)
    most = max(mechanisms, key=lambda m: m.messages)
    if most.rate is None:
        sampling = "fixed batches, a record replaced"
    else:
        sampling = f"Poisson rate {most.rate:.4g}, a record added or removed"
    total = f"total ε = {rounded_up(worst)}" if math.isfinite(worst) else "no finite ε"
    text = (
        f"{total} at δ = {ledger.delta:g} for the worst agent over {ledger.rounds} rounds"
        f" ({sampling}; up to {most.messages} messages a round; all neighbours colluding)"
    )
    if settings.mode == "per-round":
        text += f"; each round by itself spends at most ε = {settings.epsilon_per_round:g}"
    elif settings.epsilon_per_round is not None:
        text += f"; σ is Theorem 1's for ε = {settings.epsilon_per_round:g} per round, a claim that is not made here"
    if settings.randomness == "seeded":
        text += f"; {SEEDED}"
    return text


ADVERSARIES = ("one intercepted message", "one curious neighbour", "all neighbours colluding", "the final models")


def adversaries(ledger: Ledger) -> dict[str, float]:
    """ε at δ, for the worst agent, against each adversary: for all of them the total.

    A single message that crosses an edge can be a model or a momentum, which holds all rounds before it; so nothing
    smaller than the total is certified, not even for one message.
    """
    return dict.fromkeys(ADVERSARIES, ledger.epsilon)
