"""Signed statements of peers, and the account that they settle on."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdsl.data import Data
from pdsl.peer.experiment import build_public_experiment
from pdsl.peer.identity import Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.records_check import FILE as DIGEST
from pdsl.peer.runner import run
from pdsl.peer.settlement import combine, limit_weights, settle, trusted_certificates
from pdsl.peer.signatures import is_signed, sign
from pdsl.peer.statement import PURPOSE, STATEMENT, Statement, canonical
from pdsl.peer.statement_reader import StatementReader
from pdsl.peer.transport import Loop
from pdsl.settings import EngineSettings
from pdsl.shapley.account import Account
from pdsl.training.contributions import account_of_model, add_receivers, make_run_account
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import CompletedRound, rounds, state_tensors
from tests.helpers.commands import pdsl
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.refusals import refused
from tests.peer.test_runner import KEY, run_all, use_test_key

pytestmark = pytest.mark.peer

QUICK = Timeouts(silence=10.0, deadline=30.0, start=30.0)
ROUNDS = 16


class Settled:
    """Four organisations after a run with a test key, and a simulation with the same key."""

    def __init__(self, folder: Path, loop: Loop):
        self.members = make_organisations(folder)
        data, task = write_digits(self.members)
        settings = {"graph": {"kind": "full"}, "batch": {"size": 100}, "privacy": {"target_epsilon": 20.0}}
        self.plan = make_plan(self.members, task, QUICK, rounds=ROUNDS, mixing={"robust": True}, **settings)
        for member in self.members:
            join(member, self.plan)
        self.summaries = run_all(self.members, loop)
        self.simulation, self.last = simulate(self.plan, data)

    @property
    def paths(self) -> list[Path]:
        return [Path(summary["statement"]) for summary in self.summaries]

    def reader(self) -> StatementReader:
        trusted = trusted_certificates(self.plan, self.members[0].folder, [])
        return StatementReader(self.plan, trusted, 650, 10)

    def statements(self) -> list[Statement]:
        return [self.reader().read(path) for path in self.paths]


def simulate(plan: TrainingPlan, data: Data) -> tuple[Experiment, CompletedRound]:
    batch = plan.config.batch.model_copy(update={"records": plan.task.records})
    exactly = plan.config.model_copy(update={"engine": EngineSettings(exact=True), "batch": batch})
    e = prepare(exactly, data=data, graph=plan.graph, key=KEY)
    *_, last = rounds(e)
    return e, last


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Settled]:
    with pytest.MonkeyPatch.context() as patch:
        use_test_key(patch)
        yield Settled(tmp_path_factory.mktemp("settled"), loop)


def write_signed(path: Path, own: Identity, values: dict[str, Any]) -> Path:
    """Write a statement with other values, signed by a member."""
    values = {key: value for key, value in values.items() if key != "signature"}
    path.write_bytes(canonical({**values, "signature": sign(own, PURPOSE, canonical(values))}))
    return path


def test_peers_state_the_sums_of_a_simulation(settled: Settled) -> None:
    sums = state_tensors(settled.last.state)["sums"].numpy()
    for i, statement in enumerate(settled.statements()):
        assert [m.name for m in statement.measurements] == ["ada", "ben", "cleo", "dora"]
        assert all((m.sums == sums[i][:, j]).all() for j, m in enumerate(statement.measurements))
        assert all(m.rounds == ROUNDS == statement.rounds for m in statement.measurements)
        ledger = json.loads((settled.members[i].folder / "run" / "summary.json").read_text())
        assert statement.epsilon == ledger["epsilon"]


def test_a_settlement_has_the_values_of_the_neighbours_measurements_in_a_simulation(settled: Settled) -> None:
    """The account of the simulation has each agent's measurement of itself too; without it, values are equal."""
    found = settle(settled.members[1].folder, settled.paths)
    e, last = settled.simulation, settled.last
    rows = state_tensors(last.state)["sums"].numpy().copy()
    for i in range(4):
        rows[i][:, i] = 0  # on a full graph, place i is the agent itself
    members = [e.graph.neighbourhood(i).tolist() for i in range(4)]
    mean = e.engine.mean(last.state.x).float()
    expected = account_of_model(e, add_receivers(rows, members, 4), mean, ROUNDS)
    assert found.account.names == ("ada", "ben", "cleo", "dora")
    assert found.account.values == pytest.approx(expected.values, rel=1e-9)
    assert found.account.margins == pytest.approx(expected.margins, rel=1e-9)
    assert (found.missing, found.disagreements) == ((), ())
    assert found.scores == (expected.end,) * 4  # on a full graph all models are the same


def test_a_settlement_ranks_as_the_account_of_the_simulation(settled: Settled) -> None:
    simulated = make_run_account(settled.simulation, settled.last.state, settled.last.state.x.mean(0), ROUNDS)
    found = settle(settled.members[0].folder, settled.paths).account
    pairs = [pair for pair in simulated.pairs() if abs(pair.difference) > 0.2 * simulated.margins.max()]
    order = [float(found.values[int(pair.first)] - found.values[int(pair.second)]) for pair in pairs]
    assert np.corrcoef(found.values, simulated.values)[0, 1] > 0.9
    assert all(difference > 0 for difference in order)


def test_a_plan_file_with_the_public_file_suffices(settled: Settled, tmp_path: Path) -> None:
    shutil.copy(settled.members[0].folder / "plan.toml", tmp_path / "agreed.toml")
    shutil.copy(settled.members[0].folder / "public.npz", tmp_path)
    found = settle(tmp_path / "agreed.toml", settled.paths)
    assert (found.account.values == settle(settled.members[2].folder, settled.paths).account.values).all()


def test_a_statement_does_not_depend_on_private_records(settled: Settled, loop: Loop, tmp_path: Path) -> None:
    """The run has ended: the statement is made again from the same messages, with other private records."""
    copy = shutil.copytree(settled.members[0].folder, tmp_path / "ada")
    records = np.load(copy / "data.npz")
    before = settled.reader().read(copy / "run" / STATEMENT)
    np.savez(copy / "data.npz", x=1 - records["x"][:7], y=9 - records["y"][:7])
    (copy / "run" / STATEMENT).unlink()
    (copy / "run" / DIGEST).unlink()  # with it, other records are refused
    run(Identity.load(copy), loop)
    after = settled.reader().read(copy / "run" / STATEMENT)
    assert canonical(after.as_dict()) == canonical(before.as_dict())


ALTERATIONS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda s: s.update(epsilon=0.1), "not signed with ben's key"),
    (lambda s: s["parties"][0]["sums"][0][0].__setitem__(0, 7.0), "not signed with ben's key"),
    (lambda s: s.update(name="cleo"), "not signed with cleo's key"),
    (lambda s: s.update(name="eve"), "no member 'eve'"),
    (lambda s: s.update(plan="0" * 64), "another plan"),
    (lambda s: s.update(signature="00"), "not signed with ben's key"),
    (lambda s: s.update(signature=None), "not signed with ben's key"),
    (lambda s: s.update(format=2), "not a statement of format 1"),
    (lambda s: s.pop("delta"), "not a statement of format 1"),
]


@pytest.mark.parametrize(("alter", "reason"), ALTERATIONS)
def test_an_altered_statement_is_refused(
    settled: Settled, tmp_path: Path, alter: Callable[[dict[str, Any]], object], reason: str
) -> None:
    values = json.loads(settled.paths[1].read_bytes())
    alter(values)
    (tmp_path / "ben.json").write_bytes(canonical(values))
    with refused("ben.json", reason):
        settle(settled.members[0].folder, [settled.paths[0], tmp_path / "ben.json"])


def _infinite_model(values: dict[str, Any]) -> None:
    values["model"] = base64.b64encode(np.full(650, np.inf, dtype="<f4").tobytes()).decode()


def _indefinite(values: dict[str, Any]) -> None:
    values["parties"][0]["sums"][0][0][0] = -1e3


def _asymmetric(values: dict[str, Any]) -> None:
    values["parties"][0]["sums"][0][0][1] *= 1.1


def _huge_masses(values: dict[str, Any]) -> None:
    for block in values["parties"][0]["sums"]:
        block[-1] = [1e9 * value for value in block[-1]]


FALSE_VALUES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda s: s.update(rounds=ROUNDS + 1), "rounds is not between 1 and 16"),
    (lambda s: s.update(rounds=2.5), "rounds is not a whole number"),
    (lambda s: s.update(delta=0.5), "delta is not that of the plan"),
    (lambda s: s.update(epsilon=-1.0), "epsilon is negative"),
    (lambda s: s.update(model="AAAA"), "650 parameters"),
    (lambda s: s.update(model="*"), "signed by ben"),
    (_infinite_model, "infinite, undefined or very large"),
    (lambda s: s["parties"].pop(), "not its neighbourhood"),
    (lambda s: s["parties"][0].update(name="ben"), "not its neighbourhood"),
    (lambda s: s["parties"][0].update(extra=1), "unknown values"),
    (lambda s: s["parties"][0].update(rounds=ROUNDS + 1), "more rounds with ada"),
    (lambda s: s["parties"][0].update(mass=99.0), "estimate for ada contradicts its sums"),
    (lambda s: s["parties"][0].update(low=None), "estimate for ada contradicts its sums"),
    (lambda s: s["parties"][0]["sums"].pop(), "finite numbers"),
    (lambda s: s["parties"][0]["sums"][0][0].__setitem__(0, 10**80), "finite numbers"),
    (lambda s: s["parties"][0]["sums"][0][0].__setitem__(0, True), "finite numbers"),
    (_indefinite, "not sums of products"),
    (_asymmetric, "not sums of products"),
    (_huge_masses, "sums for ada have no masses up to"),
]


@pytest.mark.parametrize(("alter", "reason"), FALSE_VALUES)
def test_a_signed_statement_with_impossible_values_is_refused(
    settled: Settled, tmp_path: Path, alter: Callable[[dict[str, Any]], object], reason: str
) -> None:
    values = json.loads(settled.paths[1].read_bytes())
    alter(values)
    with refused("ben.json", reason):
        settled.reader().read(write_signed(tmp_path / "ben.json", settled.members[1], values))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"format": NaN}',
        b'{"format":1,"format":1}',
        b'{"a": 1}',
        b"9" * 9000,
    ],
)
def test_other_files_are_refused(settled: Settled, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with refused("x.json", "request it again"):
        settled.reader().read(tmp_path / "x.json")


def test_a_large_file_is_refused_before_it_is_parsed(settled: Settled, tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**31)
    with refused("x.json", "larger than"):
        settled.reader().read(tmp_path / "x.json")


def test_a_signature_for_another_purpose_is_not_valid(settled: Settled) -> None:
    own = settled.members[0]
    signature = sign(own, "card", b"content")
    assert is_signed(own.card.certificate, "card", b"content", signature)
    assert not is_signed(own.card.certificate, PURPOSE, b"content", signature)
    assert not is_signed(settled.members[1].card.certificate, "card", b"content", signature)


def test_two_statements_of_one_member_are_refused(settled: Settled) -> None:
    with refused("both statements of ada", "one of each member"):
        settle(settled.members[0].folder, [*settled.paths, settled.paths[0]])


def test_missing_statements_are_named_and_the_others_settle(settled: Settled) -> None:
    found = settle(settled.members[0].folder, settled.paths[:2])
    assert found.missing == ("cleo", "dora")
    notes = " ".join(found.account.notes)
    assert "Statements are missing: cleo, dora." in notes
    assert "one neighbour's statement only, so not compared: ada, ben" in notes
    assert len(found.account.values) == 4


def test_an_own_measurement_counts_only_if_there_is_no_other(settled: Settled) -> None:
    e, (ada, *_) = build_public_experiment(settled.plan, settled.members[0].folder), settled.statements()
    alone = combine(settled.plan, e, [ada])
    assert "their own statement only, so not confirmed: ada" in " ".join(alone.account.notes)
    (own, *others) = ada.measurements
    boasting = replace(ada, measurements=(replace(own, sums=own.sums * 5), *others))
    honest, false = (combine(settled.plan, e, [first, *settled.statements()[1:]]) for first in (ada, boasting))
    assert (honest.account.values == false.account.values).all()


def test_a_member_that_no_statement_measures_is_an_error(settled: Settled) -> None:
    e, statements = build_public_experiment(settled.plan, settled.members[0].folder), settled.statements()[:1]
    (own, ben, *others) = statements[0].measurements
    unmeasured = replace(statements[0], measurements=(own, replace(ben, sums=0 * ben.sums), *others))
    with refused("no statement measures ben", "ada or cleo or dora"):
        combine(settled.plan, e, [unmeasured])


def test_a_false_measurement_is_named(settled: Settled, tmp_path: Path) -> None:
    """Ben halves his measurement of Cleo, and signs it."""
    values = json.loads(settled.paths[1].read_bytes())
    false = replace_measurement(settled.statements()[1], "cleo", lambda sums: halve(sums))
    path = write_signed(tmp_path / "ben.json", settled.members[1], {**values, **false.as_dict()})
    found = settle(settled.members[0].folder, [settled.paths[0], path, *settled.paths[2:]])
    (sentence,) = found.disagreements
    assert sentence.startswith("Statements on cleo differ by more than noise: ben disagrees with the other neighbours")
    assert sentence in found.account.notes
    assert Account.from_json(found.account.to_json()).notes == found.account.notes


def replace_measurement(statement: Statement, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Statement:
    changed = [replace(m, sums=change(m.sums)) if m.name == name else m for m in statement.measurements]
    return replace(statement, measurements=tuple(changed))


def halve(sums: np.ndarray) -> np.ndarray:
    halved = sums.copy()
    halved[:, -1] *= 0.5
    return halved


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_a_false_weight_changes_the_account_little(settled: Settled, factor: float) -> None:
    """Its masses are the honest ones, so the reader accepts them; a huge weight is limited."""
    e, honest = build_public_experiment(settled.plan, settled.members[0].folder), settled.statements()
    scaled = replace_measurement(honest[1], "cleo", lambda sums: factor * sums)
    assert settled.reader().parse(scaled.sign(settled.members[1]), "ben.json").name == "ben"
    expected, found = (combine(settled.plan, e, [honest[0], of_ben, *honest[2:]]) for of_ben in (honest[1], scaled))
    assert found.account.values == pytest.approx(expected.account.values, abs=0.05)


def test_a_claimed_weight_is_limited(settled: Settled) -> None:
    sums = settled.statements()[0].measurements[1].sums
    limited = limit_weights({0: sums, 2: sums, 3: 1e9 * sums})
    assert (limited[0] == sums).all()
    assert limited[3] == pytest.approx(2 * sums)


def test_a_renewed_key_is_accepted_with_its_card_only(settled: Settled, tmp_path: Path) -> None:
    folder = shutil.copytree(settled.members[1].folder, tmp_path / "ben")
    renewed = Identity.renew(folder)
    values = json.loads(settled.paths[1].read_bytes())
    paths = [settled.paths[0], write_signed(tmp_path / "ben.json", renewed, values), *settled.paths[2:]]
    with refused("not signed with ben's key", "--card"):
        settle(settled.members[0].folder, paths)
    assert settle(settled.members[0].folder, paths, [folder / "card.toml"]).missing == ()


def test_a_revoked_key_is_refused(settled: Settled, tmp_path: Path) -> None:
    folder = shutil.copytree(settled.members[0].folder, tmp_path / "ada")
    (folder / "pins" / "ben.pem").write_text("")
    with refused("not signed with ben's key"):
        settle(folder, settled.paths)


def test_the_command_prints_and_writes_the_account(settled: Settled, tmp_path: Path) -> None:
    out = tmp_path / "account.json"
    printed = pdsl("peer", "settle", settled.members[0].folder, *settled.paths[:3], "--out", out)
    assert printed.code == 0
    for text in ("part of the gain", "missing", "Statements are missing: dora"):
        assert text in printed.out
    assert set(Account.from_json(out.read_text()).names) == {"ada", "ben", "cleo", "dora"}
    altered = tmp_path / "ben.json"
    altered.write_bytes(settled.paths[1].read_bytes().replace(b'"rounds":16', b'"rounds":15', 1))
    pdsl("peer", "settle", settled.members[0].folder, settled.paths[0], altered).refused("forged or altered")
