"""Poisoned models in a simulation: honest agents' accuracy with plain and with robust mixing.

    python benchmarks/poisoned_models.py [--graphs full:8 ring:10] [--seeds 5] [--attacks …] [--task mnist] [--radius]

Handwritten digits, total ε = 8, 60 rounds. Two agents send honest gradients, but false rows when models and momenta are
mixed. Prints the mean accuracy of the honest agents' models, and its difference in points to the clean run: the same
seed, data and graph with plain mixing and no attack, over the same agents. The line `none` is the cost in clean
networks. `left out` is the limit of any defence against models that hold nothing: the liars' models are not mixed at
all, and a ring falls into two parts. `--task mnist` is MNIST with public features, total ε = 2. `--radius` prints the
rehearsed radius of each mixing step instead, and the largest distance of honest neighbours in a clean run in units of
it.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.attacks import draw_attackers
from pdsl.config import load
from pdsl.engine import LocalEngine
from pdsl.settings import AttackSettings
from pdsl.training.evaluation import evaluate
from pdsl.training.experiment import prepare
from pdsl.training.trainer import build_trainer, initial_state, rounds, run_round
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

Floats = NDArray[np.float64]
LIARS = 2
ATTACKS = {
    "none": [],
    "reversed 1000 times": [f"attack.reversed_model={LIARS}"],
    "constant": [f"attack.constant_model={LIARS}"],
    "copied": [f"attack.copied_model={LIARS}"],
    "drifting by 0.1": [f"attack.drifting_model={LIARS}", "attack.drift=0.1"],
    "drifting by 0.3": [f"attack.drifting_model={LIARS}", "attack.drift=0.3"],
    "drifting by 1": [f"attack.drifting_model={LIARS}", "attack.drift=1"],
    "drifting by 3": [f"attack.drifting_model={LIARS}", "attack.drift=3"],
}
TASKS = {
    "digits": ["data.name=digits", "rounds=60", "evaluate_every=60", "privacy.target_epsilon=8"],
    "mnist": [  # the linear model on public features of `pdsl reproduce table1`
        *("data.name=mnist", "data.public_seed=0", "rounds=20", "evaluate_every=20", "batch.size=6000"),
        *("public.features=patches", "public.filters=400", "public.pool=4", "public.components=500"),
        *("public.start=labels", "privacy.target_epsilon=2"),
        *("algorithm.shapley.estimator=fast", "algorithm.shapley.sample=100"),
    ],
}


class WithoutLiars(LocalEngine):
    """Engine that gives the weight of a liar's row to the receiver."""

    liars: frozenset[int] = frozenset()

    def mix(self, x: Tensor) -> Tensor:
        rows, omega = self.deliver(x), self.omega.to(x)
        weights = torch.where(torch.tensor([j in self.liars for j in self.sender.tolist()]), 0.0, omega)
        moves = weights[:, None] * (rows - x[self.receiver])
        return x + torch.zeros_like(x).index_add(0, self.receiver, moves)


def draw_liars(agents: int, seed: int) -> frozenset[int]:
    """The agents that attack in runs with this seed."""
    return frozenset(draw_attackers(AttackSettings(reversed_model=LIARS), agents, Streams(seed)))


def honest_accuracy(settings: Sequence[str], seed: int, left_out: bool = False) -> float:
    """Mean accuracy of the agents that are no attackers with this seed. `left_out`: their models are not mixed."""
    e = prepare(load(None, [*settings, f"seed={seed}", "baselines=none"]))
    liars = draw_liars(e.graph.agents, seed)
    if left_out:
        engine = WithoutLiars(e.graph)
        engine.liars = liars
        e = replace(e, engine=engine)
    *_, last = rounds(e)
    with Workers(1) as workers:
        scores = evaluate(e, last.state.x, e.engine.mean(last.state.x), workers).scores
    return float(np.mean([score for agent, score in enumerate(scores) if agent not in liars]))


def measure_distances(settings: Sequence[str], seed: int) -> tuple[list[float], list[float]]:
    """Radius of each mixing step, and the largest distance of neighbours in a clean run in units of it."""
    e = prepare(load(None, [*settings, "mixing.robust=true", f"seed={seed}"]))
    sender, receiver = torch.as_tensor(e.graph.sender), torch.as_tensor(e.graph.receiver)
    with Workers() as workers:
        trainer, state = build_trainer(e, workers), initial_state(e)
        radii = [limits.radius for limits in trainer.limits]
        largest = [0.0] * len(radii)
        for t in range(1, e.config.rounds + 1):
            r, mixed = trainer.round(t), list[Tensor]()
            mix = r.engine.mix

            def record(x: Tensor, mix: Callable[[Tensor], Tensor] = mix, mixed: list[Tensor] = mixed) -> Tensor:
                mixed.append(x)
                return mix(x)

            r.engine.mix = record  # type: ignore[method-assign]
            state, _ = run_round(e.config, state, r)
            for step, x in enumerate(mixed):
                largest[step] = max(largest[step], float((x[sender] - x[receiver]).norm(dim=1).max()) / radii[step])
    return radii, largest


def print_radii(graph: str, base: Sequence[str], seeds: int) -> None:
    found = [measure_distances(base, seed) for seed in range(seeds)]
    radii, largest = (np.array([of_seed[n] for of_seed in found]) for n in (0, 1))
    columns = (", ".join(f"{value:.2f}" for value in column) for column in (radii.mean(0), largest.max(0)))
    print(f"| {graph} | {' | '.join(columns)} |", flush=True)


def print_accuracies(graph: str, base: Sequence[str], seeds: int, attacks: Sequence[str]) -> None:
    clean = np.array([honest_accuracy(base, seed) for seed in range(seeds)])
    _print_line(
        graph, "left out", "plain", np.array([honest_accuracy(base, s, left_out=True) for s in range(seeds)]), clean
    )
    for attack in attacks:
        for mixing, robust in (("plain", "false"), ("robust", "true")):
            settings = [*base, *ATTACKS[attack], f"mixing.robust={robust}"]
            found = clean
            if attack != "none" or mixing == "robust":
                found = np.array([honest_accuracy(settings, seed) for seed in range(seeds)])
            _print_line(graph, attack, mixing, found, clean)


def _print_line(graph: str, attack: str, mixing: str, found: Floats, clean: Floats) -> None:
    points = 100 * (found - clean)
    line = f"| {graph} | {attack} | {mixing} | {found.mean():.4f} "
    print(f"{line}| {points.mean():+.2f} | {points.min():+.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="*", default=["full:8", "ring:10"], help="kind:agents")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--radius", action="store_true", help="print radii and distances instead")
    a = parser.parse_args()
    titles = ["graph", "attack", "mixing", "accuracy of honest agents", "difference", "worst seed"]
    if a.radius:
        titles = ["graph", "radius of each mixing step", "largest honest distance in units of it"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for graph in a.graphs:
        kind, agents = graph.split(":")
        base = [*TASKS[a.task], *a.set, f"graph.kind={kind}", f"graph.agents={agents}"]
        if a.radius:
            print_radii(f"{kind} of {agents}", base, a.seeds)
        else:
            print_accuracies(f"{kind} of {agents}", base, a.seeds, a.attacks)


if __name__ == "__main__":
    main()
