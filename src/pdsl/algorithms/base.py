"""What an algorithm is: settings, a first state, and a step from one round's state to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pdsl.engine import Engine
from pdsl.engine.base import Answers
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.privacy import Noise, Release
from pdsl.privacy.metering import Meter
from pdsl.randomness import Streams
from pdsl.settings import Section
from pdsl.shapley import Validation

Facts = dict[str, Any]  # what a step has to say about itself, as JSON: goes into the round's row


class Objectives(Protocol):
    """Whoever can say what an agent's clipped gradient is: `gradients.Owners`, or a test's quadratics."""

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Row e: agents[e]'s gradient at x[e], on its batch of (round, local step); [rows, d]."""


@dataclass(frozen=True)
class Round:
    """What an algorithm may use in round t."""

    t: int
    engine: Engine
    owners: Objectives
    noise: Noise
    validation: Validation
    graph: Graph
    streams: Streams  # public ones, for what chance decides besides batches and noise
    tensors: Sequence[int]  # numbers in each of the model's parameter tensors, in the order of a row
    noise_multiplier: float  # least of the agents; 0 without noise
    meter: Meter | None = None  # counts what is taken; None without noise

    def noisy_gradients(self, x: Tensor) -> Tensor:
        """ĝ [E, d]: edge e's receiver takes its clipped gradient at the model x[e] and adds noise, for the sender."""
        return self._noisy(self.engine.receiver, self.engine.sender, x)

    def cross_gradients(self, x: Tensor) -> Iterator[Answers]:
        """Every agent sends its model, and gets its neighbours' clipped gradients at it, noisy: ĝ_{j,i} [edges, d].

        Some agents after others: on a dense graph all at once would be a row for each of M² pairs.
        """
        return self.engine.ask(x, self._noisy)

    def _noisy(self, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        return self.noise.add(self.t, makers, peers, self.owners.gradients(self.t, makers, x)).to(x.dtype)

    def own_noisy_gradients(self, x: Tensor, step: int = 0, nth: int = 0, teachers: Tensor | None = None) -> Tensor:
        """ĝ [m, d]: each agent's own gradient at its own model, clipped and noisy.

        Local steps have a batch each; the nth gradient of one step is on the same batch, with other noise.
        """
        agents = torch.tensor(self.engine.agents)
        g = self.owners.gradients(self.t, agents, x, step, teachers)
        return self.noise.add(self.t, agents, agents, g, step, nth).to(x.dtype)


class Algorithm(Section):
    """Data in, data out. Its fields are its settings, under [algorithm] in a config.

    A state is a frozen dataclass of tensors with a row per agent; `x` must be among them.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""  # where it is from
    rule: ClassVar[str] = ""  # its update, in a line

    def init(self, x0: Tensor) -> Any:
        """The state before the first round; x0 [m, d] holds every agent's first model."""
        raise NotImplementedError

    def step(self, state: Any, r: Round) -> tuple[Any, Facts]:
        """One round."""
        raise NotImplementedError

    def check(self, members: int) -> None:
        """Refuse a largest neighbourhood of so many members, if the algorithm cannot cope with it."""

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        """Vectors to each neighbour in a round."""
        return 1

    def releases(self, members: int) -> Release:
        """What leaves an agent with so many members in a round, its message to itself included."""
        raise PdslError(
            f"algorithm {self.name} does not say what it releases, so no ε can be stated; give it a method releases,"
            " or set privacy.mode=none"
        )

    def releases_in(self, graph: Graph, agent: int) -> Release:
        """What leaves this agent in a round with all its neighbours: how much of the noise is on which message, too."""
        return self.releases(int(graph.degrees[agent]))
