"""Settlement: one account of contributions from the signed statements of several organisations.

A party's value comes from its neighbours' measurements. Its own measurement counts only if there is no other, because
a party must not raise its own value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high, median_low

import numpy as np
import torch
from numpy.typing import NDArray

from pdsl.peer.experiment import build_public_experiment
from pdsl.peer.identity import CARD, PINS, PLAN, PeerInfo
from pdsl.peer.membership import read_amendments
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.statement import Statement
from pdsl.peer.statement_reader import StatementReader
from pdsl.peer.trust_store import TrustStore
from pdsl.shapley.account import Account
from pdsl.shapley.agreement import find_disagreements
from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import information
from pdsl.training.contributions import NO_LAYER, account_of_model, add_receivers
from pdsl.training.experiment import Experiment
from pdsl.training.public_groups import find_groups
from pdsl.utils.errors import PdslError

MAX_WEIGHT = 2.0  # of a receiver's measurement of a sender, in units of the median receiver's
MAX_NAMED = 20  # members in a note
Measured = dict[int, dict[int, Values]]  # sender → receiver → sums [BLOCKS, G + 1, G]


@dataclass(frozen=True)
class Settlement:
    """The account, and the statements that it is made of. The notes of the account name gaps and disagreements."""

    account: Account
    statements: tuple[Statement, ...]  # in the order of agents
    scores: tuple[float, ...]  # metric of each stated model on the public set
    missing: tuple[str, ...]  # members without a statement
    disagreements: tuple[str, ...]  # one sentence each


def settle(where: Path, paths: Sequence[Path], cards: Sequence[Path] = ()) -> Settlement:
    """Combine statements of a plan. `where`: the plan file, with the public file beside it, or a member's folder.

    cards: new cards of members that have renewed their keys. PdslError if a statement is forged, altered or invalid.
    """
    folder, file = (where, where / PLAN) if where.is_dir() else (where.parent, where)
    plan = TrainingPlan.read(file)
    if read_amendments(folder, plan):
        raise PdslError(
            f"{folder}: the plan has amendments, and a settlement needs the same members in all rounds; there is none"
            " for this plan"
        )
    e = build_public_experiment(plan, folder)
    public = find_groups(e)
    if public is None:
        raise PdslError(NO_LAYER)
    reader = StatementReader(plan, trusted_certificates(plan, folder, cards), e.network.num_parameters, public.count)
    given = _read_all(reader, paths)
    return combine(plan, e, [given[card.name] for card in plan.members if card.name in given])


def trusted_certificates(plan: TrainingPlan, folder: Path, cards: Sequence[Path]) -> dict[str, list[str]]:
    """Certificates of each member: those pinned in a member's folder, else that of the plan; and those of new cards.

    A certificate that was revoked in this folder is not trusted.
    """
    pins, trust_store = folder / PINS, TrustStore(folder / PINS)
    trusted = {
        card.name: trust_store.certificates(card.name) if (pins / f"{card.name}.pem").exists() else [card.certificate]
        for card in plan.members
    }
    own = [folder / CARD] if (folder / CARD).exists() else []
    for path in (*own, *cards):
        card = PeerInfo.read(path)
        if card.name not in trusted:
            raise PdslError(f"{path}: the plan has no member {card.name}; leave this card out")
        trusted[card.name].append(card.certificate)
    return trusted


def _read_all(reader: StatementReader, paths: Sequence[Path]) -> dict[str, Statement]:
    """Statements by the name of their member."""
    found: dict[str, Statement] = {}
    sources: dict[str, Path] = {}
    for path in paths:
        statement = reader.read(path)
        if (other := sources.get(statement.name)) is not None:
            raise PdslError(f"{other} and {path} are both statements of {statement.name}; give one of each member")
        found[statement.name], sources[statement.name] = statement, path
    return found


def combine(plan: TrainingPlan, e: Experiment, statements: Sequence[Statement]) -> Settlement:
    """One account of checked statements."""
    names = [card.name for card in plan.members]
    measured, own_only = collect(plan, statements)
    disagreements = _describe_disagreements(_in_units_of_noise(measured, own_only, e), names)
    limited = {sender: limit_weights(receivers) for sender, receivers in measured.items()}
    sums = add_receivers(
        [np.stack(list(receivers.values()), axis=1) for receivers in limited.values()],
        [[sender] * len(receivers) for sender, receivers in limited.items()],
        len(names),
    )
    model = torch.from_numpy(np.median([statement.model for statement in statements], axis=0).astype(np.float32))
    rounds = median_high(statement.rounds for statement in statements)
    account = replace(account_of_model(e, sums, model.to(e.network.device), rounds), names=tuple(names))
    missing = tuple(name for name in names if name not in {statement.name for statement in statements})
    notes = (*_notes(names, missing, measured, own_only), *disagreements)
    account = replace(account, notes=(*account.notes, *notes))
    scores = tuple(_score(e, statement.model) for statement in statements)
    return Settlement(account, tuple(statements), scores, missing, disagreements)


def _score(e: Experiment, model: NDArray[np.float32]) -> float:
    inputs, labels = e.validation
    outputs = e.network.outputs(torch.from_numpy(model).to(e.network.device), inputs.to(e.network.device))
    return e.task.score(outputs.cpu(), labels)


def collect(plan: TrainingPlan, statements: Sequence[Statement]) -> tuple[Measured, list[int]]:
    """Measurements of each member by its neighbours, and the members that only their own statement measures."""
    place = {card.name: i for i, card in enumerate(plan.members)}
    measured: Measured = {i: {} for i in range(len(place))}
    own: dict[int, Values] = {}
    for statement in statements:
        for m in statement.measurements:
            if not information(m.sums).any():
                continue  # no message of this member arrived
            if m.name == statement.name:
                own[place[m.name]] = m.sums
            else:
                measured[place[m.name]][place[statement.name]] = m.sums
    own_only = [i for i in measured if not measured[i] and i in own]
    for i in own_only:
        measured[i] = {i: own[i]}
    for i, receivers in measured.items():
        if not receivers:
            neighbours = " or ".join(plan.members[j].name for j in plan.neighbours(i)[:MAX_NAMED])
            raise PdslError(
                f"no statement measures {plan.members[i].name}; add the statement of {plan.members[i].name} or, better,"
                f" of a neighbour: {neighbours}"
            )
    return measured, own_only


def limit_weights(receivers: Mapping[int, Values]) -> dict[int, Values]:
    """Measurements of one sender, scaled down to at most MAX_WEIGHT times the median weight.

    Honest receivers have about the same weight. A false statement could claim any, and would decide the value alone.
    """
    weights = {receiver: float(information(sums).sum()) for receiver, sums in receivers.items()}
    limit = MAX_WEIGHT * median_low(weights.values())
    return {receiver: sums * min(1.0, limit / weights[receiver]) for receiver, sums in receivers.items()}


def _in_units_of_noise(measured: Measured, own_only: Sequence[int], e: Experiment) -> Measured:
    """Measurements by neighbours, divided by the variance of the noise on the edge."""
    scale = e.sigma_scale
    return {
        sender: {i: sums / scale[sender].get(i, 1.0) ** 2 for i, sums in receivers.items()}
        for sender, receivers in measured.items()
        if sender not in own_only
    }


def _describe_disagreements(measured: Measured, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"Statements on {names[found.sender]} differ by more than noise:"
        f" {' and '.join(names[i] for i in found.receivers)}"
        f" {'disagrees with the other neighbours' if len(found.receivers) == 1 else 'disagree'}"
        f" (chance among honest ones at most {_format_chance(found.chance)}). A statement is false, or"
        f" {names[found.sender]} sent different messages."
        for found in find_disagreements(measured)
    )


def _format_chance(chance: float) -> str:
    """One digit, rounded up."""
    if chance <= 1e-9:
        return "1e-9"
    exponent = math.floor(math.log10(chance))
    return f"{math.ceil(chance / 10**exponent - 1e-9) * 10.0**exponent:.0e}"


def _notes(names: Sequence[str], missing: Sequence[str], measured: Measured, own_only: Sequence[int]) -> list[str]:
    once = [names[i] for i, receivers in measured.items() if len(receivers) == 1 and i not in own_only]
    alone = [names[i] for i in own_only]
    notes = []
    if missing:
        notes.append(f"Statements are missing: {_list(missing)}.")
    if alone:
        notes.append(f"Measured by their own statement only, so not confirmed: {_list(alone)}.")
    if once:
        notes.append(f"Measured by one neighbour's statement only, so not compared: {_list(once)}.")
    return notes


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
