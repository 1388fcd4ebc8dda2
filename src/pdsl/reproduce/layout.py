"""The layout of the paper's tables: a block of rows for each ε, a column for each graph and M."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pdsl.report.numbers import signed
from pdsl.reproduce.paper import AGENTS, EPSILONS, GRAPHS, METHODS, Setting
from pdsl.reproduce.results import Entry, Results
from pdsl.reproduce.tasks import READINGS
from pdsl.rounded import rounded_up

NAMES = {"full": "Fully-connected", "bipartite": "Bipartite", "ring": "Ring"}
OFF = "noise off"
MISSING = "—"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Shown(NamedTuple):
    """A cell of a table: text, and whether ours is the best of the five methods there."""

    paper: str
    ours: str
    difference: str
    first: bool


class Block(NamedTuple):
    """The rows of one ε: a method each, a column for each graph and M."""

    title: str
    rows: dict[str, list[Shown]]


def columns() -> list[tuple[str, int]]:
    return [(graph, agents) for graph in GRAPHS for agents in AGENTS]


def label(method: str) -> str:
    return method.upper()


def blocks(results: Results, columns: Sequence[tuple[str, int]], methods: Sequence[str] = METHODS) -> Iterator[Block]:
    """A block for each ε, and one for noise off where such runs are in the folder."""
    for epsilon in EPSILONS[results.target]:
        first = Setting(results.target, epsilon, METHODS[0], GRAPHS[0], AGENTS[0])
        settings = {m: [replace(first, method=m, graph=g, agents=a) for g, a in columns] for m in methods}
        rows = {m: [_shown(results, s) for s in row] for m, row in settings.items()}
        yield Block(_title(results, first), rows)
    off = results.noise_off
    at = EPSILONS[results.target][0]  # one run serves all ε
    cells = {m: [off.get(Setting(results.target, at, m, g, a)) for g, a in columns] for m in methods}
    if any(entry for row in cells.values() for entry in row):
        yield Block(OFF, {m: [_without_noise(results, entry) for entry in row] for m, row in cells.items()})


def _title(results: Results, setting: Setting) -> str:
    """The paper's ε, and what stands in its place."""
    task = results.plan.task
    alike = (e for e in results.entries.values() if e.setting.epsilon == setting.epsilon)
    spent = sorted(e.epsilon for e in alike if e.epsilon is not None)
    ends = dict.fromkeys(rounded_up(value) for value in (*spent[:1], *spent[-1:]))
    total = f", total {'–'.join(ends)}" if spent else ""
    match task.reading:
        case "total":
            return f"ε = {setting.epsilon:g}; ours: total ε = {task.epsilon(setting):g}"
        case "per-round":
            return f"ε = {setting.epsilon:g} per round{total}"
        case "paper":
            return f"ε = {setting.epsilon:g} by Theorem 1{total}"
        case _:
            return f"ε = {setting.epsilon:g}; ours: noise off"


def _shown(results: Results, setting: Setting) -> Shown:
    entry = results.entries[setting]
    if entry.difference is None:
        return Shown(f"{entry.paper:.3f}", MISSING, "", False)
    first = results.first(setting)
    return Shown(f"{entry.paper:.3f}", _ours(results, entry), signed(entry.difference, 3), first)


def _without_noise(results: Results, entry: Entry | None) -> Shown:
    return Shown("", MISSING if entry is None else _ours(results, entry), "", False)


def _ours(results: Results, entry: Entry) -> str:
    """Our number, and behind it how many runs it is of, where these are not all seeds."""
    if entry.ours is None:
        return MISSING
    return f"{entry.ours:.3f}{f'{len(entry.seeds)}'.translate(RAISED) if _few(results, entry) else ''}"


def _few(results: Results, entry: Entry) -> bool:
    return 0 < len(entry.seeds) < len(results.plan.seeds)


def caption(results: Results) -> str:
    p = results.plan
    rates = ", ".join(f"{rate:g}" for rate in p.task.rates_of(results.target))
    text = (
        f"The paper's accuracy, ours, and the difference. Ours: test accuracy, mean over agents' own models and"
        f" {len(p.seeds)} seed{'s' * (len(p.seeds) > 1)}; ε read as {p.task.reading}: {READINGS[p.task.reading]}."
        f" Learning rate: the best of {rates} on the public set, for each method and graph, at M = {AGENTS[0]}, middle"
        f" ε, seed {p.seeds[0]}. {_lengths(results)}. {MISSING}: not run."
    )
    if any(_few(results, entry) for entry in (*results.entries.values(), *results.noise_off.values())):
        text += " A raised number behind ours: so many seeds only."
    return text if not p.task.quick else f"{text} Quick: handwritten digits and few rounds, not the paper's task."


def _lengths(results: Results) -> str:
    """Rounds and records of a batch, and at which ε they are others."""
    task, at = results.plan.task, Setting(results.target, EPSILONS[results.target][0], METHODS[0], GRAPHS[0], AGENTS[0])
    told: dict[str, list[str]] = {}
    for setting in (replace(at, epsilon=epsilon) for epsilon in EPSILONS[results.target]):
        config = task.config(setting, learning_rate=task.rates_of(results.target)[0], seed=0)
        averaged = ", models averaged" if config.averaging else ""
        text = f"{config.rounds} rounds, batches of {config.batch.size}{averaged}"
        told.setdefault(text, []).append(f"{task.epsilon(setting) or setting.epsilon:g}")
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"ε = {' and '.join(epsilons)}: {text}" for text, epsilons in told.items())
