"""Recovery of an organisation whose folder is an older copy: its ledger lacks charges for messages that were sent.

The neighbours' receipts prove how many charges the newest ledger had. As many charges are added, each for all
neighbours, and one more: a neighbour that crashed may have lost its newest receipt. The new ledger thus covers
everything that was sent, if one neighbour returns the newest receipt. Noise is not reused, because every process has
its own key.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pdsl.peer.experiment import empty_ledger
from pdsl.peer.identity import RUN, Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.membership import check_charge_marker, write_charge_marker
from pdsl.peer.noise_log import find_draws, find_generations
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.receipts import KEY_FILE, Receipts
from pdsl.peer.stages import Chain, StagePlan
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.runs.directory import LEDGER, RunDirectory
from pdsl.utils.errors import PdslError

CHECK_SECONDS = 0.1


class Recovery(NamedTuple):
    """Result of a recovery."""

    before: PeerLedger
    after: PeerLedger
    proven_round: int

    @property
    def added(self) -> int:
        return len(self.after.charges) - len(self.before.charges)


def recover(own: Identity, chain: Chain, loop: Loop, listen: str | None = None) -> Recovery:
    """Charge what the ledger lacks, according to the neighbours, the logs and the marker of charges."""
    marker, span = check_charge_marker(own, chain.newest), chain.find_span(own.card)
    directory = RunDirectory(own.folder / RUN)
    if not ((directory.path / KEY_FILE).exists() or chain.has_first_card(own.card)):
        raise PdslError(
            f"{directory.path / KEY_FILE} is missing and the key is not that of the plan, so receipts cannot be"
            " verified; restore the file from a backup"
        )
    directory.path.mkdir(exist_ok=True)
    with directory.lock():
        stored = directory.read(LEDGER)
        rounds = [row["round"] for row in directory.rows() if "absent" not in row]
        rounds += [0 if marker is None else marker.round, *(t for _, (t, *_) in find_draws(directory.path))]
        charged = _restore(own, chain.at(span.first), stored).last_round
        receipts = collect_receipts(own, chain.at(span.clamp(1 + max(charged, *rounds))), loop, listen)
        last = max(charged, receipts.proven_round, *rounds)
        stage = chain.at(span.clamp(last))
        before = _restore(own, stage, stored)
        after = _charge_logged(before, directory.path)
        missing = max(receipts.proven_charges - len(after.charges), last - after.last_round)
        if missing > 0 or (receipts.proven_round == last > 0 and not _has_vectors(before, directory.path)):
            after = _charge_unknown(after, last, 1 + missing, find_generations(directory.path))
        if after.charges != before.charges:
            known = before.stage_of(charged)
            if (chain.at(span.first).hash if known is None else known.stage) != stage.hash:
                raise PdslError(
                    f"{own.folder} lacks charges between rounds {charged} and {last}, and an amendment came into force"
                    " between them, so their noise is unknown; restore the newest copy"
                )
            directory.write(LEDGER, after.to_json([card.name for card in stage.members]).encode())
            write_charge_marker(own, stage, after.last_round)
    return Recovery(before, after, receipts.proven_round)


def _restore(own: Identity, stage: StagePlan, stored: bytes | None) -> PeerLedger:
    """The stored ledger, for charges in a stage."""
    empty = empty_ledger(stage, stage.agent(own.card.name))
    return empty if stored is None else empty.restore(stored, str(own.folder / RUN / LEDGER))


def _has_vectors(ledger: PeerLedger, run: Path) -> bool:
    """Whether the log has vectors of the last charge; also if that is unknown."""
    if ledger.generation not in find_generations(run):
        return True
    return any((t, number) == (ledger.last_round, ledger.generation) for number, (t, *_) in find_draws(run))


def _charge_logged(ledger: PeerLedger, run: Path) -> PeerLedger:
    """Add charges for vectors in the logs."""
    for number, (t, _, _, peer) in find_draws(run):
        charged = ledger.charges.get((t, number))
        if charged is None or peer not in charged | {ledger.me}:
            ledger = ledger.charge(t, number, frozenset({peer}) - {ledger.me}, ledger.mark)
    return ledger


def _charge_unknown(ledger: PeerLedger, last: int, count: int, generations: Iterable[int]) -> PeerLedger:
    """Add charges of unknown generations, for all neighbours in rounds up to `last`."""
    peers = frozenset(ledger.members) - {ledger.me}
    unused = 1 + max([0, *generations, *(of for _, of in ledger.charges)])
    for k in range(count):
        ledger = ledger.charge(max(1, last - k), unused + k, peers, ledger.mark)
    return ledger


def collect_receipts(own: Identity, plan: TrainingPlan, loop: Loop, listen: str | None) -> Receipts:
    """Wait until all neighbours have answered a ping, with the receipts that they hold."""
    transport = Transport(loop, own, plan, Events(own.folder / RUN / "events.jsonl"), 1)
    transport.start(listen)
    try:
        end = time.monotonic() + 3 * plan.timeouts.silence
        while silent := transport.state.neighbours - transport.state.answered:
            if time.monotonic() > end:
                names = ", ".join(plan.members[j].name for j in sorted(silent))
                raise PdslError(
                    f"no answer from {names}: all neighbours must return their receipts, because the newest one counts;"
                    f" see pdsl peer doctor {own.folder}"
                )
            time.sleep(CHECK_SECONDS)
        transport.say_goodbye()
        return transport.receipts
    finally:
        transport.stop()
