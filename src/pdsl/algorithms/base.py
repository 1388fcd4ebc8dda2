"""What an algorithm is: settings, a first state, and a step from one round's state to the next."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pdsl.engine import Engine
from pdsl.gradients import Owners
from pdsl.privacy import Noise, Release
from pdsl.settings import Section
from pdsl.shapley import Validation

Facts = dict[str, Any]  # what a step has to say about itself, as JSON: goes into the round's row


@dataclass(frozen=True)
class Round:
    """What an algorithm may use in round t."""

    t: int
    engine: Engine
    owners: Owners
    noise: Noise
    validation: Validation

    def noisy_gradients(self, x: Tensor) -> Tensor:
        """ĝ [E, d]: edge e's receiver takes its clipped gradient at the model x[e] and adds noise, for the sender."""
        at, peer = self.engine.receiver, self.engine.sender
        return self.noise.add(self.t, at, peer, self.owners.gradients(self.t, at, x))

    def own_noisy_gradients(self, x: Tensor) -> Tensor:
        """ĝ [m, d]: each agent's own gradient at its own model, clipped and noisy."""
        agents = torch.tensor(self.engine.agents)
        return self.noise.add(self.t, agents, agents, self.owners.gradients(self.t, agents, x))


class Algorithm(Section):
    """Data in, data out. Its fields are its settings, under [algorithm] in a config.

    A state is a frozen dataclass of tensors with a row per agent; `x` must be among them.
    """

    name: ClassVar[str]

    def init(self, x0: Tensor) -> Any:
        """The state before the first round; x0 [m, d] holds every agent's first model."""
        raise NotImplementedError

    def step(self, state: Any, r: Round) -> tuple[Any, Facts]:
        """One round."""
        raise NotImplementedError

    def check(self, members: int) -> None:
        """Refuse a largest neighbourhood of so many members, if the algorithm cannot cope with it."""

    def releases(self, members: int) -> Release:
        """What leaves an agent with so many members in a round, its message to itself included."""
        raise NotImplementedError
