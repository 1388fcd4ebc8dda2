"""Privacy statement in words: the total ε first, with everything it depends on."""

import math
from collections.abc import Sequence

from pdsl.privacy.accounting import Mechanism
from pdsl.privacy.ledger import Ledger
from pdsl.settings import PrivacySettings
from pdsl.utils.format import format_epsilon

SEEDED = "not private: seeded noise, for simulation only"


def statement(
    settings: PrivacySettings,
    ledger: Ledger | None,
    mechanisms: list[Mechanism] | None,
    public_uses: Sequence[str] = (),
) -> str:
    """Privacy guarantee of a run in one to three sentences. `public_uses`: purposes of the public set."""
    if ledger is None or mechanisms is None:
        return "none: messages have no noise, and no ε holds"
    worst = max(ledger.epsilon_per_agent)
    most = max(mechanisms, key=lambda m: m.messages)
    if most.rate is None:
        sampling = "fixed batches, a record replaced"
    else:
        sampling = f"Poisson rate {most.rate:.4g}, a record added or removed"
    total = f"total ε = {format_epsilon(worst)}" if math.isfinite(worst) else "no finite ε"
    text = (
        f"{total} at δ = {ledger.delta:g} for the worst agent over {_count(ledger.rounds, 'round')}"
        f" ({sampling}; up to {_count(most.messages, 'message')} a round; all neighbours colluding)"
    )
    if ledger.calendar is not None and most.messages > 1 and ledger.calendar.varies:
        text += "; the graph changes, and each round is charged for the most messages of any round"
    if settings.mode == "per-round":
        text += f"; each round alone spends at most ε = {settings.epsilon_per_round:g}"
    elif settings.epsilon_per_round is not None:
        text += f"; σ is from Theorem 1 with ε = {settings.epsilon_per_round:g} per round, which is not claimed here"
    if public_uses:
        text += f"; uses the public set, which is not protected, for {', '.join(public_uses)}"
    if settings.randomness == "seeded":
        text += f"; {SEEDED}"
    return text


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


ADVERSARIES = ("one intercepted message", "one curious neighbour", "all neighbours colluding", "the final models")


def adversaries(ledger: Ledger) -> dict[str, float]:
    """ε of the worst agent at δ, against each adversary: the total for all of them.

    A single message can be a model or a momentum, which depends on all earlier rounds. So nothing smaller than the
    total is certified, not even for one message.
    """
    return dict.fromkeys(ADVERSARIES, ledger.epsilon)
