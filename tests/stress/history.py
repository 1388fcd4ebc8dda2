"""Checker of the histories of all peers of a plan, which shares no code with the protocol between peers.

    python -m tests.stress.history FOLDER...      (one folder per organisation)

Reads `run/history.jsonl`, the noise logs, the ledger and the rows of each peer, and prints one JSON object with all
faults. A fault names the peer, the broken rule and the lines that break it. The rules:

    charge    a noisy vector or a message of a round was charged before it was made or sent, once per process
    ledger    the ledger has exactly the charges of the history, and every vector in a log has its charge
    noise     noise of one (generation, round, step, nth, peer) is used on one vector, which is in the log
    message   a message is received as it was sent, and only received messages are mixed
    mixing    the weights of both ends of an edge are equal, unless a row records a loss; each peer's sum to 1
    epsilon   ε of the charges in the history equals the ε that the peer states

A round that one end did not complete, because it crashed or left, has no claim about W.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pdsl.privacy import Mechanism, epsilon

DIGEST = 32  # digits of a digest in a history
Line = dict[str, Any]
Charge = tuple[int, int]  # round, generation
Draw = tuple[int, int, int, int, int]  # generation, round, step, nth, peer


class Fault(NamedTuple):
    peer: str
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer}: {self.rule}: {self.reason}"


@dataclass
class Peer:
    """Files of one organisation."""

    name: str
    agent: int
    lines: list[Line]  # of the history
    charges: list[tuple[int, int, frozenset[int]]] = field(default_factory=list)  # of the ledger
    mechanism: dict[str, Any] | None = None
    delta: float = 0.0
    members: list[int] = field(default_factory=list)  # neighbourhood, with the agent itself
    since: int = 1  # first generation with this neighbourhood and mechanism
    past: list[Line] = field(default_factory=list)  # earlier ones, with since, members and mechanism
    logs: dict[int, list[tuple[Draw, str]]] = field(default_factory=dict)  # by generation
    rows: list[Line] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of all agents
    stated_epsilon: float | None = None
    lost_logs: set[int] = field(default_factory=set)  # generations whose key or log the peer found lost or incomplete

    @cached_property
    def charged(self) -> dict[Charge, frozenset[int]]:
        """Neighbours of each charge in the history."""
        found: dict[Charge, frozenset[int]] = {}
        for line in self.of("charged"):
            key = line["round"], line["generation"]
            found[key] = found.get(key, frozenset()) | frozenset(line["peers"])
        return found

    @cached_property
    def made(self) -> dict[Draw, set[str]]:
        """Digests of the vectors made with each draw of noise, in the history and in the logs."""
        found: dict[Draw, set[str]] = defaultdict(set)
        for line in self.of("made"):
            for step, nth, peer, digest in line["draws"]:
                found[line["generation"], line["round"], step, nth, peer].add(digest)
        for draw, digest in (entry for log in self.logs.values() for entry in log):
            found[draw].add(digest)
        return found

    @cached_property
    def vectors(self) -> dict[Charge, set[int]]:
        """Receivers of the noisy vectors of each round and generation."""
        found: dict[Charge, set[int]] = defaultdict(set)
        for generation, t, _, _, peer in self.made:
            found[t, generation].add(peer)
        return found

    @cached_property
    def mixed(self) -> dict[int, Line]:
        """The last mixing of each round that has a row."""
        done = {row["round"] for row in self.rows if not row.get("absent")}
        return {line["round"]: line for line in self.of("mixed") if line["round"] in done}

    def stage(self, generation: int) -> tuple[list[int], Mechanism]:
        """Neighbourhood and mechanism of a generation. An amendment of the plan changes them for later generations."""
        now = {"since": self.since, "members": self.members, "mechanism": self.mechanism}
        found = [stage for stage in [*self.past, now] if stage["since"] <= generation][-1]
        return found["members"], Mechanism(**found["mechanism"])

    def of(self, kind: str) -> Iterator[Line]:
        return (line for line in self.lines if line["do"] == kind)

    def processes(self) -> Iterator[list[Line]]:
        """Lines of each process of this peer."""
        starts = [i for i, line in enumerate(self.lines) if line["do"] == "started"]
        for a, b in zip(starts, [*starts[1:], len(self.lines)], strict=True):
            yield self.lines[a:b]


def load(folder: Path, lines: list[Line] | None = None) -> Peer:
    """Read the files of one organisation. `lines`: its history, if it is not in the folder."""
    run = folder / "run"
    lines = _read_lines(run / "history.jsonl") if lines is None else lines
    ledger = json.loads((run / "ledger.json").read_text())
    peer = Peer(ledger["name"], ledger["agent"], lines, mechanism=ledger["mechanism"], delta=ledger["delta"])
    peer.charges = [(t, generation, frozenset(peers)) for t, generation, peers in ledger["charges"]]
    peer.members, peer.since, peer.past = ledger["members"], ledger["since"], ledger["past"]
    peer.rows = _read_lines(run / "rows.jsonl")
    for path in run.glob("sent-*.log"):
        number = int(path.stem.partition("-")[2])
        entries = [json.loads(line) for line in _complete_lines(path)]
        peer.logs[number] = [((number, *entry[:4]), entry[4][:DIGEST]) for entry in entries if len(entry) > 1]
    peer.lost_logs = {event["number"] for event in _read_lines(run / "events.jsonl") if event["event"] == LOST_LOG}
    if (run / "setup.json").exists():
        setup = json.loads((run / "setup.json").read_text())
        peer.names = setup.get("names", [])
    if (run / "summary.json").exists():
        peer.stated_epsilon = json.loads((run / "summary.json").read_text())["epsilon"]
    return peer


LOST_LOG = "lost key or log"


def _complete_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.exists() else b""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _read_lines(path: Path) -> list[Line]:
    """Values of complete lines. A power failure may leave part of a line."""
    found = []
    for line in _complete_lines(path):
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def check(peers: Iterable[Peer]) -> list[Fault]:
    """All faults in the histories of the peers of one plan."""
    everyone = {peer.agent: peer for peer in peers}
    found: list[Fault] = []
    for peer in everyone.values():
        for rule in (check_charges, check_ledger, check_noise, check_epsilon):
            found += (Fault(peer.name, name, reason) for name, reason in rule(peer))
        for pair_rule in (check_messages, check_mixing):
            found += (Fault(peer.name, name, reason) for name, reason in pair_rule(peer, everyone))
    return found


Found = Iterator[tuple[str, str]]  # rule, reason


def check_charges(peer: Peer) -> Found:
    """Each vector and each message was charged before, by the same process and once."""
    for lines in peer.processes():
        charged: dict[int, tuple[int, set[int]]] = {}  # round → generation, agents
        for line in lines:
            t = line.get("round", 0)
            generation, covered = charged.get(t, (0, set()))
            if line["do"] == "charged":
                if t in charged:
                    yield "charge", f"round {t} was charged twice by one process"
                charged[t] = line["generation"], {*line["peers"], peer.agent}
            elif line["do"] == "made":
                agents = {draw[2] for draw in line["draws"]}
                if t not in charged or generation != line["generation"] or not agents <= covered:
                    yield "charge", f"noisy vectors of round {t} for agents {sorted(agents)} were made without a charge"
            elif line["do"] == "sent" and t > 0 and line["to"] not in covered:
                yield "charge", f"phase {line['phase']} of round {t} left for agent {line['to']} without a charge"


def check_ledger(peer: Peer) -> Found:
    """The ledger has the charges of the history; one is missing only if it was refunded before any vector was made."""
    ledger = {(t, generation): agents for t, generation, agents in peer.charges}
    if len(ledger) < len(peer.charges):
        yield "ledger", "it has a charge twice"
    for (t, generation), agents in sorted(peer.charged.items()):
        made = peer.vectors.get((t, generation), set())
        if (t, generation) not in ledger:
            again = any(other > generation for at, other in peer.charged if at == t)
            if made or not again:
                yield "ledger", f"the charge of round {t}, generation {generation}, is missing"
        elif ledger[t, generation] != agents:
            yield "ledger", f"the charge of round {t} is for {sorted(ledger[t, generation])}, not {sorted(agents)}"
    for key, agents in sorted(ledger.items()):
        if key not in peer.charged and peer.vectors.get(key):
            yield "ledger", f"the charge of round {key[0]} is not in the history, which has its vectors"
        later = any(t == key[0] and generation > key[1] for t, generation in ledger)
        if later and not peer.vectors.get(key) and key[1] in peer.logs and key[1] not in peer.lost_logs:
            yield "ledger", f"round {key[0]} is charged twice, and generation {key[1]} made no vector of it"
        if uncharged := peer.vectors.get(key, set()) - agents - {peer.agent}:
            yield "ledger", f"round {key[0]} has vectors for agents {sorted(uncharged)}, which were not charged"
    for key in sorted(peer.vectors.keys() - ledger.keys() - peer.charged.keys()):
        yield "ledger", f"round {key[0]} has vectors of generation {key[1]} and no charge"


def check_noise(peer: Peer) -> Found:
    """The noise of a draw is used on one vector, and the log has this vector."""
    for (generation, t, step, nth, agent), digests in sorted(peer.made.items()):
        if len(digests) > 1:
            draw = f"generation {generation}, step {step}, nth {nth}, agent {agent}"
            yield "noise", f"the noise of round {t} ({draw}) was used on {len(digests)} different vectors"
    logged = {draw for log in peer.logs.values() for draw, _ in log}
    for draw in sorted(peer.made):
        if draw[0] in peer.logs and draw[0] not in peer.lost_logs and draw not in logged:
            yield "noise", f"a vector of round {draw[1]} for agent {draw[4]} is not in the log of generation {draw[0]}"
    sizes: Counter[Charge] = Counter((draw[1], draw[0]) for draw in peer.made)
    for line in peer.of("charged"):
        t, generation = line["round"], line["generation"]
        if sizes[t, generation] > line["messages"] * line["steps"]:
            made, paid = sizes[t, generation], line["messages"] * line["steps"]
            yield "noise", f"round {t} has {made} noisy vectors, and {paid} were charged"


def check_epsilon(peer: Peer) -> Found:
    """ε of the history is the ε that the peer states."""
    if peer.stated_epsilon is None or peer.mechanism is None:
        return
    ledger = {(t, generation) for t, generation, _ in peer.charges}
    size = {(line["round"], line["generation"]): (line["messages"], line["steps"]) for line in peer.of("charged")}
    spent: Counter[Mechanism] = Counter()
    for key, agents in peer.charged.items():
        if key in ledger or peer.vectors.get(key):
            members, whole = peer.stage(key[1])
            scale = whole.sigma_scale and tuple(
                factor for j, factor in zip(members, whole.sigma_scale, strict=True) if j in agents or j == peer.agent
            )
            spent[replace(whole, messages=size[key][0], steps=size[key][1], sigma_scale=scale)] += 1
    unseen = [key for key in ledger if key not in peer.charged]  # charged by a process that was killed at once
    computed = epsilon(tuple(spent.items()), peer.delta)
    if not unseen and not math.isclose(computed, peer.stated_epsilon, rel_tol=1e-9):
        yield "epsilon", f"the history gives ε = {computed:.6g}, and the peer states {peer.stated_epsilon:.6g}"


def check_messages(peer: Peer, everyone: dict[int, Peer]) -> Found:
    """Each message was received as it was sent, and each message that was mixed was received."""
    sent: dict[tuple[int, int, int], set[str]] = defaultdict(set)  # sender, round, phase
    for other in everyone.values():
        for line in other.of("sent"):
            if line["to"] == peer.agent:
                sent[other.agent, line["round"], line["phase"]].add(line["digest"])
    for line in peer.of("received"):
        j, t, phase = line["from"], line["round"], line["phase"]
        if j in everyone and line["digest"] not in sent[j, t, phase]:
            how = "differs from what was sent" if sent[j, t, phase] else "was never sent"
            yield "message", f"phase {phase} of round {t} from agent {j} {how}"
    for lines in peer.processes():
        received = {(line["from"], line["round"], line["phase"]) for line in lines if line["do"] == "received"}
        for line in (line for line in lines if line["do"] == "mixed"):
            for j in (int(name) for name in line["weights"] if int(name) != peer.agent):
                phases = range(line["lost"].get(str(j), line["phases"]))
                if missing := [p for p in phases if (j, line["round"], p) not in received]:
                    reason = f"round {line['round']} mixed phase {missing[0]} of agent {j}, which was not received"
                    yield "message", reason


def check_mixing(peer: Peer, everyone: dict[int, Peer]) -> Found:
    """Weights are those of the row, sum to 1, and are symmetric wherever no row records a loss."""
    for row in (row for row in peer.rows if not row.get("absent")):
        t = row["round"]
        line = peer.mixed.get(t)
        if line is None:
            yield "mixing", f"round {t} has a row, and no weights in the history"
            continue
        weights = {int(j): weight for j, weight in line["weights"].items()}
        if min(weights.values()) < 0 or not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-9):
            yield "mixing", f"the weights of round {t} sum to {sum(weights.values()):.9g}"
        present = {peer.names[j] for j in weights if j != peer.agent} if peer.names else set(row["present"])
        if set(row["present"]) != present:
            yield "mixing", f"the row of round {t} has {row['present']} present, and {sorted(present)} were mixed"
        for j in sorted(weights.keys() & everyone.keys() - {peer.agent}):
            if reason := _compare_ends(peer, everyone[j], t):
                yield "mixing", reason


def _compare_ends(i: Peer, j: Peer, t: int) -> str | None:
    """The reason why the weights of i and j in round t differ without a record of it."""
    own, other = i.mixed[t], j.mixed.get(t)
    if other is None:  # j did not complete the round: it must have started it with i
        took_part = any(i.agent in agents for (at, _), agents in j.charged.items() if at == t)
        interrupted = any(t == at and i.agent in agents for at, _, agents in j.charges)
        recorded = str(j.agent) in own["lost"]
        return None if took_part or interrupted or recorded else f"round {t} mixed {j.name}, which never started it"
    if str(j.agent) in own["lost"] or str(i.agent) in other["lost"]:
        return None
    a, b = own["weights"][str(j.agent)], other["weights"].get(str(i.agent))
    if b is None:
        return f"round {t} mixed {j.name}, which ran the round without it, and no row records a loss"
    return None if math.isclose(a, b, abs_tol=1e-12) else f"round {t} has weight {a:g} for {j.name}, and back {b:g}"


def count_doubly_stochastic(peers: list[Peer]) -> tuple[int, int]:
    """Rounds without a loss in which all peers with a row agree on all edges, and all rounds with a row."""
    everyone = {peer.agent: peer for peer in peers}
    rounds = sorted({t for peer in peers for t in peer.mixed})

    def agree(t: int) -> bool:
        lines = {i: peer.mixed[t] for i, peer in everyone.items() if t in peer.mixed}
        ends = {(i, int(j)) for i, line in lines.items() for j in line["weights"]}
        return not any(line["lost"] for line in lines.values()) and all((j, i) in ends for i, j in ends)

    return sum(agree(t) for t in rounds), len(rounds)


def summarise(peers: list[Peer]) -> dict[str, Any]:
    stochastic, rounds = count_doubly_stochastic(peers)
    return {
        "peers": len(peers),
        "processes": sum(1 for peer in peers for _ in peer.processes()),
        "charges": sum(len(peer.charges) for peer in peers),
        "noisy_vectors": sum(len(peer.made) for peer in peers),
        "messages_received": sum(1 for peer in peers for _ in peer.of("received")),
        "rounds": rounds,
        "doubly_stochastic_rounds": stochastic,
        "faults": [str(fault) for fault in check(peers)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folder of each organisation of a plan")
    result = summarise([load(folder) for folder in parser.parse_args().folders])
    print(json.dumps(result, indent=1, ensure_ascii=False))
    raise SystemExit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
