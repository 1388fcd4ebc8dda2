"""Valuation without training: what each party's records are worth at a total ε. The model is not kept.

At a given ε the noise of full batches hardly depends on the number of rounds (`privacy.recommendation`). So the
recommended rounds with all records are run on a full graph, where every party measures every other. Messages are
weighted equally, and the whole budget is spent on them.
"""

import math
from dataclasses import dataclass, replace

from pdsl.algorithms import PDSL
from pdsl.config import Config
from pdsl.privacy.recommendation import CONVEX_ROUNDS, DEEP_ROUNDS
from pdsl.privacy.statement import statement
from pdsl.runs.listeners import RunListener
from pdsl.runs.runner import NO_LISTENER, train_in_memory
from pdsl.shapley.account import Account
from pdsl.training.experiment import prepare
from pdsl.utils.errors import PdslError

ONE_LAYER = ("linear", "softmax")  # models with one layer of weights
ALL_RECORDS = 10**9  # batch size, above the records of any agent


@dataclass(frozen=True)
class Valuation:
    """The account, and the total ε of the worst agent. A note of the account has the privacy statement."""

    account: Account
    epsilon: float


def plan_valuation(config: Config, epsilon: float) -> Config:
    """The settings of a valuation: data, model, task, public set and δ are those of the config."""
    if not 0 < epsilon < math.inf:
        raise PdslError(f"--epsilon {epsilon:g}: a total ε above 0 is needed; try 2")
    if config.privacy.clipping != "per-sample":
        raise PdslError("privacy.clipping=batch hides numbers of records; a valuation needs per-sample")
    batch = config.batch
    records = batch.records if batch.rate is None else batch.size / batch.rate
    size = ALL_RECORDS if records is None else math.ceil(records)
    rounds = CONVEX_ROUNDS if config.resolve().model.name in ONE_LAYER else DEEP_ROUNDS
    privacy = {"mode": "total", "target_epsilon": epsilon}
    amounts = dict.fromkeys(("noise_multiplier", "sigma", "epsilon_per_round", "phi_min", "share_floor"))
    shapley = PDSL().shapley.model_copy(update={"weighting": "uniform"})
    return config.model_copy(
        update={
            "rounds": config.rounds if "rounds" in config.model_fields_set else rounds,
            "evaluate_every": ALL_RECORDS,
            "baselines": "none",
            "ema_decay": 0.0,
            "graph": config.graph.model_copy(update={"kind": "full", "path": None}),
            "batch": batch.model_copy(update={"size": size, "rate": None, "records": records, "sampler": "poisson"}),
            "algorithm": PDSL(shapley=shapley),
            "privacy": config.privacy.model_copy(update={**privacy, **amounts}),
        }
    )


def value_records(config: Config, listener: RunListener = NO_LISTENER) -> Valuation:
    """Run a planned valuation in memory. Nothing is written, and only the account is released."""
    e = prepare(config)
    result = train_in_memory(e, listener)
    assert result.ledger is not None  # a plan always has noise
    text = statement(e.config.privacy, result.ledger, e.mechanisms, e.public.uses)
    account = result.contributions
    return Valuation(replace(account, notes=(*account.notes, f"Privacy: {text}.")), result.ledger.epsilon)
