"""The checker of histories: silent on correct histories, and each planted fault is found with its reason."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdsl.peer.history import History
from pdsl.peer.messages import Header, encode
from pdsl.privacy import Mechanism, epsilon
from tests.stress.history import Peer, check, count_doubly_stochastic, load, summarise

MECHANISM = {"sigma": 0.05, "sensitivity": 1 / 64, "messages": 2, "rate": 0.1}
DELTA = 1e-5
ROUNDS = (1, 2, 3)


def digest(*parts: object) -> str:
    return f"{abs(hash(parts)):032x}"[:32]


def round_lines(me: int, other: int, t: int, generation: int = 1) -> list[dict[str, Any]]:
    """Lines of one round of two peers: two phases, and a noisy vector for each agent."""
    charged = {"do": "charged", "round": t, "generation": generation, "peers": [other], "messages": 2, "steps": 1}
    draws = [[0, 0, j, digest("noisy", me, t, generation, j)] for j in (me, other)]
    lines = [charged, {"do": "made", "round": t, "generation": generation, "draws": draws}]
    for phase in (0, 1):
        sent = digest("sent", me, t, phase)
        received = digest("sent", other, t, phase)
        lines.append({"do": "sent", "round": t, "phase": phase, "to": other, "digest": sent})
        lines.append({"do": "received", "round": t, "phase": phase, "from": other, "digest": received})
    weights = {str(me): 0.5, str(other): 0.5}
    return [*lines, {"do": "mixed", "round": t, "weights": weights, "lost": {}, "phases": 2}]


def make_peer(me: int) -> Peer:
    other = 1 - me
    lines: list[dict[str, Any]] = [{"do": "started", "agent": me, "plan": "a" * 64}]
    for t in ROUNDS:
        lines += round_lines(me, other, t)
    log = [((1, t, 0, 0, j), digest("noisy", me, t, 1, j)) for t in ROUNDS for j in (me, other)]
    names = ["ada", "ben"]
    return Peer(
        name=names[me],
        agent=me,
        lines=lines,
        charges=[(t, 1, frozenset({other})) for t in ROUNDS],
        mechanism=MECHANISM,
        delta=DELTA,
        members=[0, 1],
        logs={1: log},
        rows=[{"round": t, "present": [names[other]]} for t in ROUNDS],
        names=names,
        stated_epsilon=epsilon(((Mechanism(**MECHANISM), len(ROUNDS)),), DELTA),  # type: ignore[arg-type]
    )


def find(peer: Peer, do: str, t: int, n: int = 0) -> dict[str, Any]:
    return [line for line in peer.lines if line["do"] == do and line["round"] == t][n]


def test_correct_histories_have_no_faults() -> None:
    peers = [make_peer(0), make_peer(1)]
    assert check(peers) == [] and count_doubly_stochastic(peers) == (3, 3)


def sent_before_charged(ada: Peer, ben: Peer) -> None:
    charged = find(ada, "charged", 2)
    ada.lines.remove(charged)
    ada.lines.insert(ada.lines.index(find(ada, "sent", 2)) + 1, charged)


def charged_twice(ada: Peer, ben: Peer) -> None:
    ada.lines.insert(ada.lines.index(find(ada, "made", 2)), dict(find(ada, "charged", 2)))


def noise_used_twice(ada: Peer, ben: Peer) -> None:
    again = copy.deepcopy(find(ada, "made", 2))
    again["draws"][1][3] = digest("another gradient")
    ada.lines += [{"do": "started"}, dict(find(ada, "charged", 2)), again]


def vector_not_in_the_log(ada: Peer, ben: Peer) -> None:
    ada.logs[1] = [entry for entry in ada.logs[1] if entry[0][1] != 2]


def charge_missing_in_the_ledger(ada: Peer, ben: Peer) -> None:
    ada.charges = [charge for charge in ada.charges if charge[0] != 2]


def ledger_charged_twice_without_need(ada: Peer, ben: Peer) -> None:
    ada.logs[1] = [entry for entry in ada.logs[1] if entry[0][1] != 3]
    ada.logs[2] = [((2, 3, 0, 0, j), digest("noisy", 0, 3, 2, j)) for j in (0, 1)]
    first = ada.lines.index(find(ada, "charged", 3))
    ada.lines[first + 1 :] = [{"do": "started"}, *round_lines(0, 1, 3, generation=2)]
    ada.charges.append((3, 2, frozenset({1})))
    ada.stated_epsilon = epsilon(((Mechanism(**MECHANISM), 4),), DELTA)  # type: ignore[arg-type]


def message_changed(ada: Peer, ben: Peer) -> None:
    find(ben, "received", 2)["digest"] = digest("changed")


def message_of_another_round(ada: Peer, ben: Peer) -> None:
    find(ben, "received", 2)["digest"] = find(ada, "sent", 1)["digest"]


def mixed_without_a_message(ada: Peer, ben: Peer) -> None:
    ada.lines.remove(find(ada, "received", 3, 1))


def one_sided_exclusion(ada: Peer, ben: Peer) -> None:
    ben.rows[1]["present"] = []
    find(ben, "mixed", 2)["weights"] = {"1": 1.0}


def weights_that_do_not_sum_to_one(ada: Peer, ben: Peer) -> None:
    for peer in (ada, ben):
        find(peer, "mixed", 2)["weights"] = {"0": 0.5, "1": 0.4}


def unequal_weights(ada: Peer, ben: Peer) -> None:
    find(ben, "mixed", 2)["weights"] = {"0": 0.25, "1": 0.75}


def partner_that_never_started(ada: Peer, ben: Peer) -> None:
    ben.lines = [line for line in ben.lines if line.get("round") != 3 or line["do"] == "sent"]
    ben.rows[2] = {"round": 3, "absent": True}
    ben.charges.pop()
    ben.logs[1] = [entry for entry in ben.logs[1] if entry[0][1] != 3]
    ben.stated_epsilon = None


def epsilon_too_small(ada: Peer, ben: Peer) -> None:
    assert ada.stated_epsilon is not None
    ada.stated_epsilon *= 0.99


FAULTS: dict[Callable[[Peer, Peer], None], str] = {
    sent_before_charged: "ada: charge: phase 0 of round 2 left for agent 1 without a charge",
    charged_twice: "ada: charge: round 2 was charged twice by one process",
    noise_used_twice: "ada: noise: the noise of round 2 (generation 1, step 0, nth 0, agent 1) was used on 2 different",
    vector_not_in_the_log: "ada: noise: a vector of round 2 for agent 0 is not in the log of generation 1",
    charge_missing_in_the_ledger: "ada: ledger: the charge of round 2, generation 1, is missing",
    ledger_charged_twice_without_need: "ada: ledger: round 3 is charged twice, and generation 1 made no vector of it",
    message_changed: "ben: message: phase 0 of round 2 from agent 0 differs from what was sent",
    message_of_another_round: "ben: message: phase 0 of round 2 from agent 0 differs from what was sent",
    mixed_without_a_message: "ada: message: round 3 mixed phase 1 of agent 1, which was not received",
    one_sided_exclusion: "ada: mixing: round 2 mixed ben, which ran the round without it, and no row records a loss",
    weights_that_do_not_sum_to_one: "ada: mixing: the weights of round 2 sum to 0.9",
    unequal_weights: "ada: mixing: round 2 has weight 0.5 for ben, and back 0.25",
    partner_that_never_started: "ada: mixing: round 3 mixed ben, which never started it",
    epsilon_too_small: "ada: epsilon: the history gives ε =",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_with_its_reason(plant: Callable[[Peer, Peer], None]) -> None:
    peers = ada, ben = make_peer(0), make_peer(1)
    plant(ada, ben)
    found = [str(fault) for fault in check(peers)]
    assert any(FAULTS[plant] in fault for fault in found), found


def test_a_recorded_loss_and_an_interrupted_round_are_no_faults() -> None:
    ada, ben = make_peer(0), make_peer(1)
    find(ada, "mixed", 2)["lost"] = {"1": 1}
    find(ben, "mixed", 2)["weights"] = {"1": 1.0}
    ben.rows[1]["present"] = []
    ben.lines.remove(find(ben, "mixed", 3))  # it crashed before it stored the round
    ben.rows[2] = {"round": 3, "absent": True}
    assert check([ada, ben]) == [] and count_doubly_stochastic([ada, ben]) == (1, 3)


def test_epsilon_of_a_history_counts_each_generation_with_the_noise_of_its_stage() -> None:
    ada, ben = make_peer(0), make_peer(1)
    later = {**MECHANISM, "sigma": 0.08}
    for peer in (ada, ben):
        peer.past = [{"since": 1, "members": [0, 1], "mechanism": MECHANISM}]
        peer.mechanism, peer.since = later, 2
        move_to_generation(peer, 3, 2)
        spent = ((Mechanism(**MECHANISM), 2), (Mechanism(**later), 1))  # type: ignore[arg-type]
        peer.stated_epsilon = epsilon(spent, DELTA)
    assert check([ada, ben]) == []
    ada.past[0]["mechanism"] = later
    assert [fault.rule for fault in check([ada, ben])] == ["epsilon"]


def move_to_generation(peer: Peer, t: int, generation: int) -> None:
    """Let round t have a later generation, as after an amendment."""
    moved = [entry for entry in peer.logs[1] if entry[0][1] == t]
    peer.logs[1] = [entry for entry in peer.logs[1] if entry[0][1] != t]
    peer.logs[generation] = [((generation, *draw[1:]), found) for draw, found in moved]
    for line in peer.lines:
        if line.get("round") == t and "generation" in line:
            line["generation"] = generation
    peer.charges = [(at, generation if at == t else n, agents) for at, n, agents in peer.charges]


def test_a_history_has_one_line_per_message_and_continues_after_a_cut(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "run" / "history.jsonl"
    message = encode(Header("a" * 64, 1, 0, 0, 1), torch.arange(3.0))
    history = History(path)
    history.start(0, "a" * 64)
    for _ in range(3):  # a neighbour that fetches it again and again
        history.send(1, 1, 0, message)
    history.receive(1, 1, 0, message)
    history.close()
    path.write_bytes(path.read_bytes() + b'{"do": "cut')
    again = History(path)
    again.start(0, "a" * 64)
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["do"] for line in lines] == ["started", "sent", "received", "started"]
    assert lines[1]["digest"] == lines[2]["digest"]


def test_the_report_of_a_folder_has_counts_and_faults(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ada = make_peer(0)
    charges = [[1, 1, [1]], [2, 1, [1]]]
    stage = {"mechanism": MECHANISM, "members": [0, 1], "since": 1, "past": []}
    values = {"name": "ada", "agent": 0, "delta": DELTA, "charges": charges, **stage}
    (run / "ledger.json").write_text(json.dumps(values))
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ada.lines))
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ada.rows))
    log = "".join(json.dumps([*draw[1:], found * 2]) + "\n" for draw, found in ada.logs[1])
    (run / "sent-1.log").write_text("[1]\n" + log)
    result = summarise([load(tmp_path)])
    assert result["charges"] == 2 and result["noisy_vectors"] == 6 and result["rounds"] == 3
    assert result["faults"] == ["ada: ledger: the charge of round 3, generation 1, is missing"]
