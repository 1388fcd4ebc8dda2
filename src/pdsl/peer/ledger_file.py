"""The ledger of an organisation on disk, and the checks that it is complete before a run continues with it."""

from pdsl.peer.experiment import empty_ledger
from pdsl.peer.identity import CHARGE_MARKER, RUN, Identity
from pdsl.peer.ledger import PeerLedger, has_no_charges
from pdsl.peer.membership import check_charge_marker, read_charge_marker, write_charge_marker
from pdsl.peer.noise_log import check_ledger
from pdsl.peer.stages import StagePlan
from pdsl.runs.directory import LEDGER, RunDirectory
from pdsl.utils.errors import PdslError

TRACES = ("secret-*.key", "sent-*.log", "checkpoint/*")  # of a run that had a ledger


def open_directory(own: Identity, stage: StagePlan) -> RunDirectory:
    """Open or create the run directory; PdslError if a ledger must be there and is missing."""
    path = own.folder / RUN
    if (path / LEDGER).exists():
        check_charge_marker(own, stage)
        return RunDirectory(path)  # even if other files are lost
    if check_charge_marker(own, stage) is not None:
        raise PdslError(
            f"{path / LEDGER} is missing, but {own.folder / CHARGE_MARKER} has charged rounds of this plan: the privacy"
            " spent is unknown; restore the ledger from a backup"
        )
    if stage.chain.is_replacement(own.card):
        raise PdslError(
            f"{path / LEDGER} is missing, but {own.card.name} was a member with another machine before: the privacy"
            f" spent is unknown; copy {RUN}/ and {CHARGE_MARKER} from that machine or its backup"
        )
    if (path / "config.toml").exists():
        return RunDirectory.open(path)
    return RunDirectory.create(path, stage.config.to_toml(), {})


def load_ledger(own: Identity, stage: StagePlan, directory: RunDirectory) -> PeerLedger:
    """Load the ledger for the rounds of a stage, or write a new one."""
    path = directory.path
    me, names = stage.agent(own.card.name), [card.name for card in stage.members]
    new = empty_ledger(stage, me)
    stored = directory.read(LEDGER)
    if stored is not None and has_no_charges(stored):
        stored = None  # of an earlier start without a round, possibly under another plan
    elif stored is None and any(any(path.glob(trace)) for trace in TRACES):
        raise PdslError(f"{path / LEDGER} is missing, so the privacy spent is unknown; restore it from a backup")
    ledger = new if stored is None else new.restore(stored, str(path / LEDGER))
    if not all(stage.chain.knows(past.stage) for past in ledger.past):
        raise PdslError(
            f"{path / LEDGER} has charges under an amendment that {own.folder} lacks; apply it: pdsl peer amend"
            f" {own.folder} FILE"
        )
    check_ledger(path, ledger, directory.rows())
    if (marker := read_charge_marker(own)) is not None and marker.round > ledger.last_round:
        raise PdslError(
            f"{path / LEDGER} is outdated: {own.folder / CHARGE_MARKER} has a charge for round {marker.round};"
            " restore the newest ledger"
        )
    if ledger.charges:
        write_charge_marker(own, stage, ledger.last_round)
    if stored is None:
        directory.write(LEDGER, new.to_json(names).encode())
    return ledger
