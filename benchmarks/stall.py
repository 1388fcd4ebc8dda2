"""Cost of a member that delivers every message just before the deadline, for the others.

    python benchmarks/stall.py [--members 8] [--rounds 100] [--deadline 5]

All members are neighbours. Each is a process that runs a roll call and two phases per round, with some work (a sleep)
before each. First all are honest. Then the last one delays each message until just before its time for the round is
over. Prints one JSON object with the total time of the slowest honest member in both cases, and the bound: 20 % more
and three deadlines.
"""

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PHASES, D = 2, 1000
MARGIN = 0.2  # seconds before a deadline


def member(folder: str, rounds: int, work: float, stall: float, results: Any) -> None:
    """Run all rounds in this process. Puts the name, the seconds and the seconds waited for each neighbour."""
    from pdsl.peer.attendance import QuorumError
    from pdsl.peer.identity import Identity
    from pdsl.peer.membership import load_plan
    from pdsl.peer.status import Events
    from pdsl.peer.transport import Loop, Transport

    torch.set_num_threads(1)
    own = Identity.load(Path(folder))
    peer = Transport(Loop(), own, load_plan(own), Events(own.folder / "events.jsonl"), D)
    peer.start()
    v, t, ran = torch.ones(D), 1, 0
    result = peer.roll_call(t)  # all processes have started
    began = time.monotonic()
    while t <= rounds:
        for phase in range(0 if result.jump else PHASES):
            time.sleep(work + stall)
            peer.exchange(t, phase, dict.fromkeys(peer.state.present, v))
        ran += not result.jump
        t = result.jump or t + 1
        try:
            result = peer.roll_call(t) if t <= rounds else result
        except QuorumError:  # the others have finished
            break
    seconds = time.monotonic() - began
    results.put((own.card.name, seconds, ran, peer.waited_for()))
    peer.finish()
    peer.stop()


def measure(members: int, rounds: int, deadline: float, work: float, stall: float) -> dict[str, Any]:
    """Total seconds of the slowest honest member, and what the honest members say about the last one."""
    from tests.stress.soak import create_organisations, free_ports

    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pdsl-stall-") as folder:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(members)]
        timeouts = {"silence": 20.0, "patience": 10.0, "deadline": deadline, "start": 30.0}
        settings = ["model.name=softmax", "graph.kind=full", f"rounds={rounds}"]
        create_organisations(Path(folder), addresses, settings, timeouts)
        results = context.Queue()
        processes = [
            context.Process(
                target=member,
                args=(f"{folder}/org-{i}", rounds, work, stall * (i == members - 1), results),
                daemon=True,
            )
            for i in range(members)
        ]
        for process in processes:
            process.start()
        found = {name: rest for name, *rest in (results.get(timeout=1800) for _ in processes)}
        for process in processes:
            process.join(30)
    last = f"org-{members - 1}"
    honest = [rest for name, rest in found.items() if name != last]
    return {
        "seconds": round(max(seconds for seconds, _, _ in honest), 1),
        "rounds_of_honest": min(ran for _, ran, _ in honest),
        "rounds_of_last": found[last][1],
        "late_by": round(max(waited[last] for _, _, waited in honest), 1),
        "latest_is_last": all(max(waited, key=lambda name: waited[name]) == last for _, _, waited in honest),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--deadline", type=float, default=5.0)
    parser.add_argument("--work", type=float, default=0.2, help="seconds before each phase")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = arguments.members, arguments.rounds, arguments.deadline, arguments.work
    clean = measure(*settings, stall=0.0)
    stalled = measure(*settings, stall=(arguments.deadline - MARGIN) / PHASES)
    bound = 1.2 * clean["seconds"] + 3 * arguments.deadline
    result = {"clean": clean, "stalled": stalled, "bound": round(bound, 1), "kept": stalled["seconds"] <= bound}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
