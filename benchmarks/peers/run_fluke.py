"""fluke: FedAvg with all clients, or its gossip on a ring. python run_fluke.py ROUNDS fedavg|gossip"""

import statistics
import sys
from collections import Counter

import networkx
import torch
from common import AGENTS, LEARNING_RATE, B, Stopwatch, cnn, participation, parts, report


def declare_torchvision_operators() -> list[str]:
    """Make torchvision importable if its compiled operators do not match this torch. Returns a note in that case.

    That happens with a CPU build of torch and the CUDA build of torchvision from PyPI. fluke imports torchvision at its
    start, but this benchmark uses none of its operators.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as e:
        if "operator torchvision::" not in str(e):
            raise
    else:
        return []
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return ["torchvision does not match this build of torch: imported without its operators, which are not used here"]


NOTES = declare_torchvision_operators()

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.decentralized import GossipDFL, Topology  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.utils import ClientObserver, FederationObserver  # noqa: E402


class Observer(FederationObserver, ClientObserver):
    """Measures rounds and counts their local steps."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self.steps: Counter[int] = Counter()

    def end_fit(self, round: int, **_: object) -> None:
        self.steps[round] += 1

    def end_round(self, round: int) -> None:
        self.stopwatch.round_ended()


def federation(kind: str) -> FedAVG | GossipDFL:
    loaders = [  # one batch per epoch: one local step
        FastDataLoader(x, y, num_labels=10, batch_size=B, shuffle=True, single_batch=True) for x, y in parts()
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * AGENTS, None, num_classes=10))
    client = {
        "batch_size": B,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LEARNING_RATE},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    settings = DDict(model=cnn(), client=client, server={"weighted": False})
    if kind == "fedavg":
        return FedAVG(AGENTS, splitter, settings)
    settings.client.update(policy="aggregate")
    return GossipDFL(AGENTS, splitter, settings, topology=Topology(networkx.cycle_graph(AGENTS)))


def main(rounds: int, kind: str) -> None:
    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    algorithm = federation(kind)
    observer = Observer()
    algorithm.set_callbacks(observer)
    algorithm.run(n_rounds=rounds + 1, eligible_perc=1.0)
    trained = participation(statistics.mean(observer.steps[t] for t in range(2, rounds + 2)))
    how = "FedAvg through a server" if kind == "fedavg" else "its gossip on a ring, each to one random neighbour"
    report("fluke-fl", observer.stopwatch, str(torch.get_num_threads()), f"{how}; {trained}", NOTES)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
