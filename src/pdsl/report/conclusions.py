"""Sentences that say what to conclude from a run's Shapley values."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from pdsl.report.run_data import Run, mean_present
from pdsl.utils.format import chunks

CONFIDENCE = 0.95  # of all statements together
MAX_BLOCKS = 20  # of consecutive rounds: means of blocks depend less on one another than rounds do
MIN_BLOCKS = 5
NO_SPREAD = 1e-9  # of the largest φ: a smaller spread is rounding
MAX_NAMED = 3  # agents named on each side


class SenderEffect(NamedTuple):
    """Effect of an agent's messages compared with the others': its t statistic, and the quantile it must exceed."""

    agent: int
    statistic: float
    quantile: float

    @property
    def is_significant(self) -> bool:
        return abs(self.statistic) > self.quantile


def compare_senders(run: Run) -> list[SenderEffect]:
    """The effect of each sender compared with the median sender, largest first; [] with too few rounds.

    Effects are in units of their spread in each block of rounds, because φ shrinks as training converges. The quantile
    holds for all agents together (Bonferroni).
    """
    rounds = [r.phi for r in run.rounds if r.phi]
    blocks = [[rounds[t] for t in part] for part in chunks(len(rounds), MAX_BLOCKS)]
    senders = sorted({j for i, j, _ in run.setup.edges if i != j})
    if len(blocks) < MIN_BLOCKS or len(senders) < 2:
        return []
    means = [[mean_present(phi) for phi in zip(*block, strict=True)] for block in blocks]
    effects = [_sender_effects(run, phi) for phi in means]
    found = []
    for j in senders:
        values = [of_block[j] for of_block in effects if j in of_block]
        if len(values) >= MIN_BLOCKS:
            quantile = float(student.ppf(1 - (1 - CONFIDENCE) / (2 * len(senders)), len(values) - 1))
            found.append(SenderEffect(j, _statistic(values), quantile))
    return sorted(found, key=lambda c: -c.statistic)


def _sender_effects(run: Run, phi: Sequence[float | None]) -> dict[int, float]:
    """Effect s_j of each sender in φ_ij = r_i + s_j + d·[i = j], by least squares, minus the median, over the spread.

    The receiver's effect r_i is needed because receivers differ in how much any message helps them, and d because an
    agent's own message fits its own model. φ_ij is None for an edge without messages.
    """
    M = run.setup.agents
    present = [(i, j, value) for (i, j, _), value in zip(run.setup.edges, phi, strict=True) if value is not None]
    receivers, senders = (np.array([edge[k] for edge in present], dtype=int) for k in (0, 1))
    values = np.array([value for *_, value in present])
    values = values / (np.abs(values).max(initial=0.0) or 1.0)  # may be too small or too large to be squared
    columns = (receivers, M + senders, np.where(receivers == senders, 2 * M, -1))
    normal, moments = np.zeros((2 * M + 1, 2 * M + 1)), np.zeros(2 * M + 1)
    for a in columns:
        np.add.at(moments, a[a >= 0], values[a >= 0])
        for b in columns:
            both = (a >= 0) & (b >= 0)
            np.add.at(normal, (a[both], b[both]), 1.0)
    known = sorted({j for i, j, _ in present if i != j})
    effects = (np.linalg.pinv(normal, hermitian=True) @ moments)[[M + j for j in known]]
    effects = effects - np.median(effects) if known else effects  # one agent that differs moves no other
    spread = float(np.sqrt(np.square(effects).mean())) if known else 0.0
    return dict(zip(known, (effects / spread if spread > NO_SPREAD else 0.0 * effects).tolist(), strict=True))


def _statistic(values: Sequence[float]) -> float:
    """Mean divided by its standard error; 0 for values that do not vary around 0."""
    deviation = stdev(values)
    if deviation < 1e-12:  # the same in all blocks: certain, unless it is 0
        return 0.0 if abs(values[0]) < 1e-12 else 1e12 * (1 if values[0] > 0 else -1)
    return fmean(values) / (deviation / sqrt(len(values)))


def conclude(run: Run) -> str:
    """What to conclude from the Shapley values: who helps most and least, or that nobody differs beyond noise."""
    found = compare_senders(run)
    if not found:
        return "There are too few rounds to tell which agents help more than others."
    more = [c.agent for c in found if c.is_significant and c.statistic > 0]
    less = [c.agent for c in reversed(found) if c.is_significant and c.statistic < 0]
    if not more and not less:
        return "Conclusion: no agent helps more or less than the others beyond noise."
    parts = [f"{_name(run, more)} helped the others most"] if more else []
    parts += [f"{_name(run, less)} helped {'least' if more else 'the others least'}"] if less else []
    rest = len(found) - len(more) - len(less)
    tail = f" The other {rest} do not differ beyond noise." if rest > 1 else ""
    return f"Conclusion: {', and '.join(parts)}.{tail}"


def _name(run: Run, agents: Sequence[int]) -> str:
    shown = [run.setup.agent_names.full(i) for i in agents[:MAX_NAMED]]
    if len(agents) > MAX_NAMED:
        shown.append(f"{len(agents) - MAX_NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
