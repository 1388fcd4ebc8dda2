"""Progress of an organisation's run: from its newest checkpoint, or from the stage of the plan before."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pdsl.peer.carry_over import carry_over
from pdsl.peer.identity import Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.row_layout import arrange_row, find_members
from pdsl.peer.stages import StagePlan
from pdsl.peer.status import Events
from pdsl.runs.directory import RunDirectory
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import State, initial_state, restore_state


@dataclass
class Progress:
    """Progress of a run, replaced as a whole at the end of a round."""

    t: int  # next round
    state: State | None  # None: no state to start from yet
    rows: list[RoundRecord]
    ledger: PeerLedger


def find_next_round(directory: RunDirectory) -> int:
    """Round after the newest intact checkpoint; without one, after the last row."""
    checkpoint, _ = directory.newest()
    return 1 + (len(directory.rows()) if checkpoint is None else checkpoint.round)


def load_progress(
    own: Identity, stage: StagePlan, directory: RunDirectory, e: Experiment, ledger: PeerLedger, events: Events
) -> Progress:
    """Load the newest intact checkpoint, with a row for each round up to it."""
    checkpoint, warnings = directory.newest()
    for warning in warnings:
        events.log("damaged", what=warning)
    last = ledger.last_round if checkpoint is None else checkpoint.round
    last = max(last, stage.chain.find_span(own.card).first - 1)
    rows = directory.rows()[:last]
    rows += [absent_row(t) for t in range(len(rows) + 1, last + 1)]
    rows = _write_rows(stage, directory, rows, ledger)
    if checkpoint is None:
        return Progress(last + 1, None if last else initial_state(e), rows, ledger)
    state = restore_state(stage.config, checkpoint.tensors)
    charged = ledger.stage_of(checkpoint.round)
    if charged is not None and charged.stage != stage.hash:
        state = carry_over(stage.config, state, charged.members, ledger.me, stage.graph)
    return Progress(last + 1, state, rows, ledger)


def continue_progress(
    p: Progress, members: Sequence[int], stage: StagePlan, directory: RunDirectory, ledger: PeerLedger
) -> Progress:
    """Progress `p` of the stage before, with its neighbourhood `members`, for the neighbours of a stage."""
    state = p.state and carry_over(stage.config, p.state, members, ledger.me, stage.graph)
    return Progress(p.t, state, _write_rows(stage, directory, p.rows, ledger), ledger)


def _write_rows(
    stage: StagePlan, directory: RunDirectory, rows: list[RoundRecord], ledger: PeerLedger
) -> list[RoundRecord]:
    """Write the rows so far, with places for the neighbours of all stages. Returns them."""
    planned, members = stage.plan_members(ledger.me), find_members(ledger)
    rows = [arrange_row(row, planned, members) for row in rows]
    directory.write("rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return rows


def absent_row(t: int) -> RoundRecord:
    """Row of a round without this organisation."""
    return {"round": t, "absent": True, "messages": 0, "bytes": 0}
