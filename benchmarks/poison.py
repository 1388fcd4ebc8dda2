"""Valid but false messages from malicious peers: organisations in separate processes on this machine, over mutual TLS.

    python -m benchmarks.poison [--peers 8] [--liars 2] [--rounds 60] [--lies LIE …] [--variants V …] [--out DIR]

All peers are connected; handwritten digits, total ε = 8. The last peers flip the labels in their folder (0 for 9, 1 for
8, …), or send reversed gradients scaled by 10 or 1000; with `model too` these also enter their own models. Or their
gradients are honest, and the models and momenta that they send are reversed and scaled by 1000, a constant vector of
norm 100, shifted by 0.05 more in every round, or a neighbour's. Prints, for each variant of weights and mixing, the
mean accuracy of the honest peers' models, and the weight that they gave to each malicious peer's gradients over the
last ten rounds.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.stress.soak import Site, create_organisations, forkserver, free_ports, peer_process

VARIANTS = ("evidence, robust", "evidence, plain", "uniform, plain")  # weights and mixing
LIES = (
    "none",
    "flipped labels",
    "reversed 10 times",
    "reversed 1000 times",
    "reversed 1000 times, model too",
    "model reversed 1000 times",
    "model constant",
    "model drifting",
    "model copied",
)


def reversing_process(times: float, own_too: bool, folder: str, *rest: Any) -> None:
    """Run a peer that sends its neighbours its gradients multiplied by -times."""
    from pdsl.peer.engine import PeerEngine

    honest = PeerEngine.reply

    def reply(self: PeerEngine, v: Tensor) -> Tensor:
        reversed_rows = (self.sender != self.receiver)[:, None] | torch.tensor(own_too)
        return honest(self, torch.where(reversed_rows, -times * v, v))

    PeerEngine.reply = reply  # type: ignore[method-assign]
    peer_process(folder, *rest)


def poisoning_process(lie: str, folder: str, *rest: Any) -> None:
    """Run a peer that sends its neighbours false models and momenta."""
    from pdsl.peer.engine import PeerEngine

    direction = torch.randn(10**7, generator=torch.Generator().manual_seed(0))  # longer than any model here
    last: dict[str, Tensor] = {}

    def falsify(engine: PeerEngine, row: Tensor) -> Tensor:
        unit = direction[: len(row)] / direction[: len(row)].norm()
        if lie == "model reversed 1000 times":
            return -1000 * row
        if lie == "model constant":
            return 100 * unit
        if lie == "model drifting":
            return row + 0.05 * engine._t * unit
        return last.get("row", row)

    def deliver(self: PeerEngine, x: Tensor) -> Tensor:
        rows = self._exchange(dict.fromkeys(self._present, falsify(self, x[0])), x[0])
        last["row"] = rows[0]
        return rows

    PeerEngine.deliver = deliver  # type: ignore[method-assign]
    peer_process(folder, *rest)


def flip_labels(folder: Path) -> None:
    with np.load(folder / "data.npz") as own:
        x, y = own["x"], own["y"]
    np.savez(folder / "data.npz", x=x, y=9 - y)


def run(folder: Path, peers: int, liars: int, rounds: int, variant: str, lie: str) -> tuple[float, float]:
    """Mean accuracy of the honest peers, and the weight that they give to a malicious one."""
    settings = [f"rounds={rounds}", "model.name=softmax", "algorithm.learning_rate=2.0", "graph.kind=full"]
    weights, mixing = variant.split(", ")
    settings += [f"algorithm.shapley.weighting={weights}", f"mixing.robust={'true' if mixing == 'robust' else 'false'}"]
    timeouts = {"silence": 10.0, "deadline": 60.0, "start": 120.0}
    create_organisations(folder, [f"127.0.0.1:{port}" for port in free_ports(peers)], settings, timeouts)
    context = forkserver()
    sites: list[Site] = []
    for i in range(peers):
        lying = i >= peers - liars
        here = folder / f"org-{i}"
        if lying and lie == "flipped labels":
            flip_labels(here)
        if lying and lie.startswith("reversed"):
            liar = partial(reversing_process, float(lie.split()[1]), lie.endswith("model too"))
            sites.append(Site(here, None, context, liar))
        elif lying and lie.startswith("model"):
            sites.append(Site(here, None, context, partial(poisoning_process, lie)))
        else:
            sites.append(Site(here, None, context))
    for site in sites:
        site.start()
    for site in sites:
        site.process.join()
    honest = sites[: peers - liars]
    failed = [site.folder.name for site in honest if site.summary is None]
    if failed:
        sys.exit(f"no summary from {', '.join(failed)}; see process.log in {folder}")
    accuracy = float(np.mean([site.summary["accuracy"] for site in honest if site.summary]))
    shares = [row["shapley"]["share"][-liars:] for site in honest for row in site.rows[-10:] if "shapley" in row]
    return accuracy, float(np.mean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("peers", 8), ("liars", 2), ("rounds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lies", nargs="*", choices=LIES, default=LIES)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--out", type=Path, help="keep the folders here")
    a = parser.parse_args()
    if not 0 < a.liars < a.peers:
        parser.error("--liars must be at least 1 and less than --peers")
    print(f"{a.peers} peers, {a.liars} malicious, {a.rounds} rounds\n")
    print("| attack | weights, mixing | accuracy of honest peers | weight of a malicious peer |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for lie in a.lies:
            for variant in a.variants:
                folder = (a.out or Path(temporary)) / f"{lie}-{variant}".replace(", ", "-").replace(" ", "-")
                accuracy, share = run(folder, a.peers, a.liars, a.rounds, variant, lie)
                print(f"| {lie} | {variant} | {accuracy:.4f} | {share:.4f} |", flush=True)


if __name__ == "__main__":
    main()
