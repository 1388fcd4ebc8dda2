"""What do orders read off a circle save? Real MNIST, ten agents, full graph, total ε = 1.

    python benchmarks/orders.py [rounds]

After so many rounds, all 1,024 coalitions of an agent's messages are valued by their true models. That gives its
Shapley values, and lets R = 20 orders be drawn a thousand times: independent ones, as many pairs of one and its
reverse, and those read off a circle.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from pdsl.algorithms import PDSL
from pdsl.config import validate
from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import Values, draw_orders, exact, members, monte_carlo
from pdsl.shapley.valuation import value_function
from pdsl.training.experiment import prepare
from pdsl.training.trainer import build_trainer, initial_state
from pdsl.utils.workers import Workers

R, DRAWS, RECORDS = 20, 1000, 500
MEMBERS = 10


def coalition_values(rounds: int, value: str, probe: float) -> Values:
    """v of every coalition, by bit mask; in units of the worth, which do not matter here."""
    settings = {
        "rounds": 100,
        "data": {"name": "mnist"},
        "graph": {"kind": "full", "agents": MEMBERS},
        "model": {"name": "mnist-cnn", "channels": [8, 16], "activation": "tanh", "norm": "rms"},
        "batch": {"size": 250},
        "algorithm": {"name": "pdsl", "learning_rate": 3.0, "shapley": {"sample": 100, "check_every": 0}},
        "privacy": {"target_epsilon": 1.0},
    }
    e = prepare(validate(settings, "orders"))
    algorithm, (inputs, labels) = e.config.algorithm, (e.validation[0][:RECORDS], e.validation[1][:RECORDS])
    assert isinstance(algorithm, PDSL)
    with Workers() as workers:
        parts, state = build_trainer(e, workers), initial_state(e)
        for t in range(1, rounds + 1):
            state, _ = algorithm.step(state, parts.round(t))
        at = next(parts.round(rounds + 1).cross_gradients(state.x))
        models = state.x[0] - probe * algorithm.learning_rate * at.split_by_agent(at.values)[0]

        def worth(mask: int) -> int:
            x = models[members(mask)].mean(0) if mask else state.x[0]
            return int(value_function(value, e.task).of(e.network.outputs(x, inputs)[None], labels)[0])

        return np.array(workers.map(worth, range(2**MEMBERS)), dtype=np.float64)


def orders(how: str, generator: np.random.Generator) -> NDArray[np.int64]:
    if how == "mirrored":
        half = draw_orders(MEMBERS, ShapleySettings(permutations=R // 2, orders="independent"), generator)
        return np.concatenate([half, half[:, ::-1]])
    return draw_orders(MEMBERS, ShapleySettings.model_validate({"permutations": R, "orders": how}), generator)


def error_and_cost(values: Values, how: str) -> tuple[float, float]:
    """Root of the mean squared error of φ over draws and members, and the mean number of coalitions to evaluate."""
    plan, generator = exact(MEMBERS), np.random.default_rng(0)
    true = plan.phi(values[list(plan.coalitions)], MEMBERS)
    plans = [monte_carlo(orders(how, generator)) for _ in range(DRAWS)]
    errors = [plan.phi(values[list(plan.coalitions)], MEMBERS) - true for plan in plans]
    return float(np.sqrt(np.mean(np.square(errors)))), float(np.mean([len(plan.coalitions) for plan in plans]))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print("| worth | orders | error | coalitions |\n|---|---|---|---|")
    for value, probe in (("loss", 0.1), ("accuracy", 1.0)):
        values = coalition_values(rounds, value, probe)
        found = {how: error_and_cost(values, how) for how in ("independent", "mirrored", "circular")}
        for how, (error, coalitions) in found.items():
            relative = error / found["independent"][0]
            print(f"| {value}, {probe:g} of a step | {how} | {relative:.2f} | {coalitions:.0f} |", flush=True)


if __name__ == "__main__":
    main()
