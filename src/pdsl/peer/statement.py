"""Statement of one organisation at the end of its run: its measurements of the neighbours' messages, signed.

A statement contains sums of products of noisy messages with gradients of public records (`shapley.masses`), the final
model, attendance and ε. All of these are functions of noisy messages, public records and the plan. So a statement is
post-processing and costs no privacy.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdsl.config import Config
from pdsl.peer.identity import Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.signatures import sign
from pdsl.peer.stages import StagePlan
from pdsl.runs.directory import RunDirectory
from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import estimate_totals
from pdsl.training.evaluation import finite
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import State, restore_state, state_tensors
from pdsl.utils.types import JsonDict

STATEMENT = "statement.json"  # in an organisation's run directory
FORMAT = 1
PURPOSE = "statement"  # of the signature
Z = 1.96  # two-sided 95 % interval


@dataclass(frozen=True)
class Measurement:
    """Measurement of one party's messages, by one receiver."""

    name: str
    rounds: int  # in which a message arrived
    sums: Values  # [BLOCKS, G + 1, G]

    def estimate(self) -> tuple[float, float]:
        """Total mass of the party's records, and half the width of its interval; infinite with too few rounds."""
        totals, errors = estimate_totals(self.sums[:, None])
        return float(totals[0]), Z * float(errors[0])

    def as_dict(self) -> JsonDict:
        mass, margin = self.estimate()
        low, high = finite(mass - margin), finite(mass + margin)
        rest = {"name": self.name, "rounds": self.rounds, "mass": mass, "low": low, "high": high}
        return {**rest, "sums": self.sums.tolist()}


@dataclass(frozen=True)
class Statement:
    """Content of `statement.json`. The own messages are measured too, with their noise."""

    plan: str  # hash
    name: str
    rounds: int  # run by this organisation
    epsilon: float | None  # total according to its ledger
    delta: float
    model: NDArray[np.float32]  # [d] its final model
    measurements: tuple[Measurement, ...]  # one for each member of the neighbourhood, in the order of agents

    def as_dict(self) -> JsonDict:
        return {
            "format": FORMAT,
            "plan": self.plan,
            "name": self.name,
            "rounds": self.rounds,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "model": base64.b64encode(self.model.astype("<f4").tobytes()).decode(),
            "parties": [measurement.as_dict() for measurement in self.measurements],
        }

    def sign(self, own: Identity) -> bytes:
        """The file: canonical JSON with a signature of all other values."""
        values = self.as_dict()
        return canonical({**values, "signature": sign(own, PURPOSE, canonical(values))})


def canonical(values: JsonDict) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_statement(
    own: Identity,
    stage: StagePlan,
    directory: RunDirectory,
    state: State,
    rows: Sequence[RoundRecord],
    ledger: PeerLedger,
) -> str | None:
    """Write the signed statement into a run directory. Returns its path; None if there is none.

    A run that measured nothing has no statement. A plan with amendments has none either: its measurements are of
    different members and noise levels.
    """
    amended = bool(stage.chain.amendments)
    made = None if amended else make_statement(stage, stage.agent(own.card.name), state, rows, ledger)
    if made is None:
        directory.remove(STATEMENT)
        return None
    directory.write(STATEMENT, made.sign(own))
    return str(directory.path / STATEMENT)


def make_statement(
    plan: TrainingPlan, me: int, state: State, rows: Sequence[RoundRecord], ledger: PeerLedger
) -> Statement | None:
    """The statement of agent `me` after its last round; None if its algorithm or clipping measures nothing."""
    sums = state_tensors(state).get("sums")
    if sums is None or sums.numel() == 0:
        return None
    run = [row for row in rows if "absent" not in row]
    names = [plan.members[j].name for j in plan.graph.neighbourhood(me).tolist()]
    parties = sums[0, :, : len(names)].cpu().numpy()  # there is room for the largest neighbourhood of the graph
    return Statement(
        plan=plan.hash,
        name=plan.members[me].name,
        rounds=len(run),
        epsilon=finite(ledger.epsilon),
        delta=ledger.delta,
        model=state.x[0].detach().cpu().numpy().astype(np.float32),
        measurements=tuple(
            Measurement(name, len(run) if name == plan.members[me].name else _attendance(run, name), of_party)
            for name, of_party in zip(names, np.moveaxis(parties, 1, 0), strict=True)
        ),
    )


def _attendance(rows: Sequence[RoundRecord], name: str) -> int:
    return sum(name in row.get("present", ()) and name not in row.get("lost", ()) for row in rows)


def keep_sums(config: Config, before: State, after: State, lost: Sequence[int]) -> State:
    """The state after a round with the sums of lost members as before it; `lost`: their places.

    The agent's own message took the place of theirs, and must not count as theirs.
    """
    tensors, sums = state_tensors(after), state_tensors(before).get("sums")
    if not lost or sums is None or tensors["sums"].numel() == 0:
        return after
    kept = tensors["sums"].clone()
    kept[:, :, lost] = sums[:, :, lost] if sums.numel() else 0.0
    return restore_state(config, {**tensors, "sums": kept})
