"""Poisoned models in a simulation: honest agents' accuracy with plain and with robust mixing.

    python benchmarks/poisoned_models.py [--graphs full:8 ring:10] [--seeds 5] [--attacks …] [--set KEY=VALUE …]

Handwritten digits, total ε = 8, 60 rounds. Two agents send honest gradients, but false rows when models and momenta are
mixed. Prints the mean accuracy of the honest agents' models, and its difference in points to the clean run: the same
seed, data and graph with plain mixing and no attack, over the same agents. The line `none` is the cost in clean
networks. `--set` replaces the settings of digits.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from pdsl.attacks import draw_attackers
from pdsl.config import load
from pdsl.settings import AttackSettings
from pdsl.training.evaluation import evaluate
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

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
DIGITS = ["data.name=digits", "rounds=60", "evaluate_every=60", "privacy.target_epsilon=8"]


def honest_accuracy(settings: Sequence[str], seed: int) -> float:
    """Mean accuracy of the agents that are no attackers with this seed."""
    e = prepare(load(None, [*settings, f"seed={seed}", "baselines=none"]))
    *_, last = rounds(e)
    with Workers(1) as workers:
        scores = evaluate(e, last.state.x, e.engine.mean(last.state.x), workers).scores
    liars = draw_attackers(AttackSettings(reversed_model=LIARS), e.graph.agents, Streams(seed))
    return float(np.mean([score for agent, score in enumerate(scores) if agent not in liars]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="*", default=["full:8", "ring:10"], help="kind:agents")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--skip-plain", action="store_true", help="no attacks on plain mixing")
    a = parser.parse_args()
    print(
        "| graph | attack | mixing | accuracy of honest agents | difference | worst seed |\n|---|---|---|---|---|---|"
    )
    for graph in a.graphs:
        kind, agents = graph.split(":")
        base = [*(a.set or DIGITS), f"graph.kind={kind}", f"graph.agents={agents}"]
        clean = np.array([honest_accuracy(base, seed) for seed in range(a.seeds)])
        for attack in a.attacks:
            for robust in ("true",) if a.skip_plain else ("false", "true"):
                if attack == "none" and robust == "false":
                    found = clean
                else:
                    settings = [*base, *ATTACKS[attack], f"mixing.robust={robust}"]
                    found = np.array([honest_accuracy(settings, seed) for seed in range(a.seeds)])
                points = 100 * (found - clean)
                mixing = "robust" if robust == "true" else "plain"
                line = f"| {kind} of {agents} | {attack} | {mixing} | {found.mean():.4f} "
                print(f"{line}| {points.mean():+.2f} | {points.min():+.2f} |", flush=True)


if __name__ == "__main__":
    main()
