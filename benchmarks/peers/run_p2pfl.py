"""p2pfl: its decentralised FedAvg, nodes connected in memory as a ring. python run_p2pfl.py ROUNDS default|short

Ray actors are disabled: the nodes are threads of one process, so nothing is copied to an actor and back. The Lightning
learner does not support this version of torch (torchvision<0.18), so the local step is plain torch behind p2pfl's
learner interface.
"""

import copy
import sys
import threading
from collections import Counter

import numpy as np
import torch
from common import AGENTS, B, Stopwatch, cnn, local_step, participation, parts, report
from datasets import Dataset
from p2pfl.settings import Settings
from torch import Tensor

Settings.general.DISABLE_RAY = True  # before the other imports, which would start Ray

from p2pfl.communication.protocols.protobuff.memory import MemoryCommunicationProtocol  # noqa: E402
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset  # noqa: E402
from p2pfl.learning.frameworks import Framework  # noqa: E402
from p2pfl.learning.frameworks.learner import Learner  # noqa: E402
from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel  # noqa: E402
from p2pfl.management.logger import logger  # noqa: E402
from p2pfl.node import Node  # noqa: E402
from p2pfl.utils.topologies import TopologyFactory, TopologyType  # noqa: E402
from p2pfl.utils.utils import wait_convergence, wait_to_finish  # noqa: E402

SECONDS_TO_CONNECT = 120
SECONDS_TO_FINISH = 1500


class Model(P2PFLModel):
    """A torch module in p2pfl's model interface."""

    def get_parameters(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.model.parameters()]

    @torch.no_grad()
    def set_parameters(self, params: list[np.ndarray] | bytes) -> None:
        if isinstance(params, bytes):
            params, info = self.decode_parameters(params)
            self.additional_info.update(info)
        for p, new in zip(self.model.parameters(), params, strict=True):
            p.copy_(torch.tensor(new))

    def get_framework(self) -> str:
        return Framework.PYTORCH.value


class OneStep(Learner):
    """One step of SGD per round, without evaluation."""

    def __init__(self, x: Tensor, y: Tensor):
        super().__init__()
        self.x, self.y = x, y
        self.steps = 0

    def fit(self) -> P2PFLModel:
        model = self.get_model()
        local_step(model.get_model(), self.x, self.y)
        model.set_contribution([self.addr], B)
        self.steps += 1
        return model

    def interrupt_fit(self) -> None:
        pass

    def evaluate(self) -> dict[str, float]:
        return {}

    def get_framework(self) -> str:
        return Framework.PYTORCH.value


class Observer:
    """Measures rounds; a round ends when its last node has completed it."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self.ended: Counter[int] = Counter()
        self.lock = threading.Lock()

    def watch(self, node: Node) -> None:
        increase_round = node.state.increase_round

        def observed() -> None:
            increase_round()
            with self.lock:
                self.ended[node.state.round] += 1
                if self.ended[node.state.round] == AGENTS:
                    self.stopwatch.round_ended()

        node.state.increase_round = observed


def ring(observer: Observer) -> list[Node]:
    """Start and connect the nodes."""
    nodes = []
    first = cnn()
    for i, (x, y) in enumerate(parts()):
        data = P2PFLDataset(Dataset.from_dict({"label": y.tolist()}), batch_size=B)  # the learner holds the images
        model = Model(copy.deepcopy(first))
        node = Node(model, data, f"node-{i}", learner=OneStep(x, y), protocol=MemoryCommunicationProtocol())
        observer.watch(node)
        node.start()
        nodes.append(node)
    TopologyFactory.connect_nodes(TopologyFactory.generate_matrix(TopologyType.RING, AGENTS), nodes)
    wait_convergence(nodes, AGENTS - 1, wait=SECONDS_TO_CONNECT)
    return nodes


def main(rounds: int, periods: str) -> None:
    torch.set_num_threads(1)  # as in its own learner
    logger.set_level("ERROR")
    Settings.gossip.TTL = AGENTS  # its example requires at least one per node
    if periods == "short":
        Settings.gossip.PERIOD = 0.01
        Settings.gossip.MODELS_PERIOD = 0.1
        Settings.gossip.MODELS_PER_ROUND = 4
    observer = Observer()
    nodes = ring(observer)
    nodes[0].set_start_learning(rounds=rounds + 1, epochs=1, trainset_size=AGENTS)
    wait_to_finish(nodes, timeout=SECONDS_TO_FINISH)
    trained = participation(sum(node.learner.steps for node in nodes) / (rounds + 1))
    waits = "gossip every 0.1 s" if periods == "short" else "its default gossip periods"
    what = f"its FedAvg, every node gathers all models; {waits}; {trained}"
    report("p2pfl", observer.stopwatch, f"{AGENTS}×1", what)
    for node in nodes:
        node.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
