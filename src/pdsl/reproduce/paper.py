"""The paper's results: two tables of test accuracies (paper.csv) and six figures of loss curves.

A table has 135 cells: three ε, five methods, three graphs, three numbers of agents. A figure has nine panels, M down
and ε across. Each panel has the curves of the five methods, for the cells of one graph in a table.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TITLES = {
    "table1": "Table I: test accuracy on MNIST",
    "table2": "Table II: test accuracy on CIFAR-10",
    "fig1": "Figure 1: loss on MNIST, fully connected graphs",
    "fig2": "Figure 2: loss on MNIST, bipartite graphs",
    "fig3": "Figure 3: loss on MNIST, ring graphs",
    "fig4": "Figure 4: loss on CIFAR-10, fully connected graphs",
    "fig5": "Figure 5: loss on CIFAR-10, bipartite graphs",
    "fig6": "Figure 6: loss on CIFAR-10, ring graphs",
}
TABLES = ("table1", "table2")
FIGURES = {  # table and graph of each figure
    "fig1": ("table1", "full"),
    "fig2": ("table1", "bipartite"),
    "fig3": ("table1", "ring"),
    "fig4": ("table2", "full"),
    "fig5": ("table2", "bipartite"),
    "fig6": ("table2", "ring"),
}
EPSILONS = {"table1": (0.08, 0.1, 0.3), "table2": (0.5, 0.7, 1.0)}  # per round
AGENTS = (10, 15, 20)
GRAPHS = ("full", "bipartite", "ring")
METHODS = ("dp-dpsgd", "dp-cga", "muffliato", "dp-net-fleet", "pdsl")  # in the order of the tables' rows


@dataclass(frozen=True)
class Setting:
    """A cell of a table, in the paper's terms."""

    table: str
    epsilon: float  # the paper's, per round
    method: str
    graph: str
    agents: int

    @property
    def slot(self) -> int:
        """Index among the table's three ε."""
        return EPSILONS[self.table].index(self.epsilon)


@cache
def accuracies() -> dict[Setting, float]:
    """Accuracies of all settings, in the order of the tables."""
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as file:
        return {
            Setting(r["table"], float(r["epsilon"]), r["method"], r["graph"], int(r["agents"])): float(r["accuracy"])
            for r in csv.DictReader(file)
        }


def settings_of(target: str) -> list[Setting]:
    """The settings of a table, or of a figure's panels."""
    table, graph = FIGURES.get(target, (target, None))
    return [s for s in accuracies() if s.table == table and graph in (None, s.graph)]


def panels(figure: str) -> dict[str, tuple[int, float]]:
    """Agents and ε of a figure's panels a1 to c3."""
    table, _ = FIGURES[figure]
    return {
        f"{row}{column}": (agents, epsilon)
        for row, agents in zip("abc", AGENTS, strict=True)
        for column, epsilon in enumerate(EPSILONS[table], 1)
    }
