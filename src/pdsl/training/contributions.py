"""The account of a finished run: masses of the parties' records, the data game, Shapley values, intervals."""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pdsl.shapley.account import Account, make_account
from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import Masses, estimate_masses
from pdsl.shapley.retraining import DataGame, make_head, plan_coalitions
from pdsl.training.experiment import Experiment
from pdsl.training.public_groups import find_groups
from pdsl.training.trainer import State, algorithm_state
from pdsl.utils.errors import PdslError

MIN_Z = 2.0  # standard errors; a smaller mass of a group counts as zero
REPLICATES = 4  # games with masses changed by their errors, for the part of the intervals that is due to noise
Z = 1.96  # two-sided 95 % interval
MODEL_ERROR = 0.28  # half-width due to the imitation by public records, relative to the mean |value|: measured
NO_LAYER = "no account of contributions: the model's output is not that of a linear layer"
METHOD = "retraining on public records weighted by estimated masses"


def make_run_account(e: Experiment, state: State, mean: Tensor, rounds: int) -> Account:
    """The account of a run of `rounds` rounds that ended with `state` and the mean model [d].

    It is computed from noisy messages, public records and settings only, so it costs no privacy. PdslError says why a
    run has no account.
    """
    return account_of_model(e, sums_by_sender(e, state), mean, rounds)


def account_of_model(e: Experiment, sums: Values, mean: Tensor, rounds: int) -> Account:
    """The account of agents with these sums [BLOCKS, M, G + 1, G], whose mean model [d] after all rounds is given."""
    game = build_game(e, mean, rounds)
    task, (inputs, labels) = e.task, e.validation
    initial = e.network.initial_parameters()
    start, end = (task.score(e.network.outputs(x, inputs.to(x.device)).cpu(), labels) for x in (initial, mean))
    return account_from_sums(sums, game, e.agent_names, start, end, np.random.default_rng(e.config.seed))


def sums_by_sender(e: Experiment, state: State) -> Values:
    """Sums for the masses of every agent, over all receivers of its messages: [BLOCKS, M, G + 1, G].

    If several processes have the agents, all of them must call it.
    """
    sums = getattr(algorithm_state(state), "sums", None)
    if not isinstance(sums, Tensor):
        raise PdslError(f"algorithm {e.config.algorithm.name} keeps no account of contributions; use algorithm pdsl")
    if e.config.privacy.clipping == "batch":
        raise PdslError("no account of contributions: privacy.clipping=batch hides numbers of records; use per-sample")
    if sums.numel() == 0:
        raise PdslError(NO_LAYER)
    members = [e.graph.neighbourhood(i).tolist() for i in e.engine.agents]
    parts = e.engine.gather([(len(sums), add_receivers(sums.cpu().numpy(), members, e.graph.agents))])
    if sum(count for count, _ in parts) < e.graph.agents:
        raise PdslError("no account of contributions: this process has the messages to some of the agents only")
    total: Values = np.sum([part for _, part in parts], axis=0)
    return total


def add_receivers(rows: Sequence[Values] | Values, members: Sequence[Sequence[int]], agents: int) -> Values:
    """Sums of each sender, [BLOCKS, agents, G + 1, G].

    rows: those of each receiver [BLOCKS, K, G + 1, G]; members: its senders, in the order of the second dimension.
    """
    blocks, _, *shape = rows[0].shape
    total = np.zeros((blocks, agents, *shape))
    for row, senders in zip(rows, members, strict=True):
        for place, sender in enumerate(senders):
            total[:, sender] += row[:, place]
    return total


def build_game(e: Experiment, mean: Tensor, rounds: int) -> DataGame:
    """The data game of a run; PdslError if the model does not end with a linear layer."""
    public = find_groups(e)
    if public is None:
        raise PdslError(NO_LAYER)
    head = make_head(public.layer, e.network.initial_parameters(), mean, public.inputs)
    momentum = float(getattr(e.config.algorithm, "momentum", 0.0))
    rates = e.learning_rates[:rounds]
    return DataGame(
        head, public.labels.cpu(), public.groups.cpu(), e.task, rates, momentum, e.config.privacy.max_grad_norm
    )


def account_from_sums(
    sums: Values, game: DataGame, names: Sequence[str], start: float, end: float, generator: np.random.Generator
) -> Account:
    """Account of parties with these sums [BLOCKS, M, G + 1, G]; start and end: the metric on the public set."""
    masses = estimate_masses(sums)
    parties = len(names)
    plan = plan_coalitions(parties, generator)

    def shapley(of: Values) -> Values:
        return plan.phi(game.values(of, plan.coalitions), parties)

    values = shapley(significant(masses))
    noise = pooled_deviation(values, [shapley(changed) for changed in draw_masses(masses, generator)])
    margin = math.hypot(Z * noise, MODEL_ERROR * float(np.abs(values).mean()))
    sign = 1.0 if game.task.higher_is_better else -1.0
    notes = [] if game.head.whole else ["the layers below the last linear layer are those of the final model"]
    return make_account(
        names,
        values,
        np.full(parties, margin),
        math.sqrt(2) * margin * (1 - np.eye(parties)),
        metric=game.task.metric,
        start=start,
        end=end,
        gain=sign * (end - start),
        method=METHOD,
        coalitions=len(plan.coalitions),
        notes=notes,
    )


def significant(masses: Masses) -> Values:
    """Masses [n, G] of at least MIN_Z standard errors; 0 for the others.

    A small mass that is an error would teach a coalition a class of which it has no record. The standard error is that
    of all masses together, because one of BLOCKS blocks is not exact.
    """
    known = masses.errors[np.isfinite(masses.errors)]
    error = math.sqrt(float(np.mean(known**2))) if len(known) else 0.0
    return np.where(masses.masses < MIN_Z * error, 0.0, masses.masses)


def draw_masses(masses: Masses, generator: np.random.Generator) -> list[Values]:
    """Masses changed by their standard errors, in pairs of opposite sign."""
    found = []
    for _ in range(REPLICATES // 2):
        change = np.where(np.isfinite(masses.errors), masses.errors, 0.0) * generator.standard_normal(
            masses.masses.shape
        )
        for sign in (1, -1):
            found.append(significant(Masses(np.maximum(masses.masses + sign * change, 0.0), masses.errors)))
    return found


def pooled_deviation(values: Values, replicates: Sequence[Values]) -> float:
    """Standard deviation of a value over replicates, pooled over parties."""
    return float(np.sqrt(np.mean([(replicate - values) ** 2 for replicate in replicates])))
