"""The `Algorithm` interface: settings, an initial state, and a step from one round's state to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import torch
from pydantic import Field, ValidationError
from torch import Tensor
from typing_extensions import TypeVar  # with defaults; pydantic requires this package

from pdsl.algorithms.schedule import AUTO, LearningRate, learning_rates
from pdsl.engine import Engine
from pdsl.engine.base import Replies
from pdsl.engine.robust import RobustEngine
from pdsl.privacy import Noise, Release
from pdsl.privacy.metering import Meter
from pdsl.section import Section
from pdsl.settings import ScheduleSettings
from pdsl.shapley.masses import PublicGradients
from pdsl.shapley.valuation import Validation
from pdsl.tasks import Task
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

Metrics = JsonDict  # metrics of one step as JSON values; they become part of the round's row


class Objectives(Protocol):
    """Source of the agents' clipped gradients: `LocalGradients`, or a test's quadratics."""

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Gradient of agents[e] at x[e] for each row e, on its batch of (round, local step): [rows, d]."""


@dataclass(frozen=True)
class Round:
    """Everything that an algorithm may use in round t."""

    t: int
    engine: Engine
    local: Objectives
    noise: Noise
    validation: Validation
    graph: Graph  # of all rounds: a schedule is the union of its rounds, and graph.at(t) is this round's
    streams: Streams  # public random streams, for randomness other than batches and noise
    tensors: Sequence[int]  # sizes of the model's parameter tensors, in the order of a row
    noise_multiplier: float  # smallest over the agents; 0 without noise
    learning_rate: float  # γ of this round
    peak_rate: float  # largest γ of all rounds
    meter: Meter | None = None  # counts gradients and messages; None without noise
    public_gradients: PublicGradients | None = None  # None if records are not clipped one by one
    robust: RobustEngine | None = None  # limits neighbours' rows in `engine.mix`; None with plain mixing

    def noisy_gradients(self, x: Tensor) -> Tensor:
        """ĝ [E, d]: clipped gradient of each edge's receiver at the model x[e], with noise, for the edge's sender."""
        return self._noisy(self.engine.receiver, self.engine.sender, x)

    def cross_gradients(self, x: Tensor) -> Iterator[Replies]:
        """Send each agent's model to its neighbours and return their noisy gradients at it: ĝ_{j,i} [edges, d].

        Agents come in chunks, because a dense graph has a row for each of M² pairs.
        """
        return self.engine.request(x, self._noisy)

    def _noisy(self, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        return self.noise.add(self.t, makers, peers, self.local.gradients(self.t, makers, x)).to(x.dtype)

    def own_noisy_gradients(self, x: Tensor, step: int = 0, nth: int = 0, teachers: Tensor | None = None) -> Tensor:
        """ĝ [m, d]: each agent's own clipped noisy gradient at its own model.

        Each local `step` has its own batch. A second gradient on the same batch (`nth` = 1, 2, …) has new noise.
        """
        agents = torch.tensor(self.engine.agents)
        g = self.local.gradients(self.t, agents, x, step, teachers)
        return self.noise.add(self.t, agents, agents, g, step, nth).to(x.dtype)


class HasModels(Protocol):
    """A state: a frozen dataclass of tensors with a row per agent, with the models among them."""

    @property
    def x(self) -> Tensor:  # [m, d]
        ...


StateT = TypeVar("StateT", bound=HasModels, default=Any)


class Algorithm(Section, Generic[StateT]):
    """An algorithm without mutable state. Its fields are its settings, under [algorithm] in a config.

    A step takes γ from the round, `r.learning_rate`, because a schedule may change it from round to round.
    StateT is a frozen dataclass of tensors with a row per agent; `x`, the models, must be among them.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""  # citation
    rule: ClassVar[str] = ""  # update rule, in one line

    gossips: ClassVar[bool] = True  # mixes models with `engine.mix`, which can be robust
    base_rate: ClassVar[float] = 1.0  # learning rate without noise, relative to that of D-PSGD, for "auto"

    learning_rate: LearningRate = Field(
        AUTO,
        description="γ; auto: from noise, batch, rounds and model; or a number, or package.module:function",
    )
    schedule: ScheduleSettings = ScheduleSettings()

    if not TYPE_CHECKING:  # type checkers and editors see the settings as arguments

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as e:
                first = e.errors()[0]
                name = ".".join(str(part) for part in first["loc"])
                message = first["msg"].removeprefix("Value error, ")
                raise PdslError(f"{type(self).__name__}: {name}={first['input']!r:.60}: {message}") from None

        __init__.__pydantic_base_init__ = True  # for calls only: a config validates in its own way

    def learning_rates(self, rounds: int) -> tuple[float, ...]:
        """γ of each of the rounds 1, …, `rounds`."""
        return learning_rates(self.learning_rate, self.schedule, rounds)

    @property
    def rates_need_rounds(self) -> bool:
        """Whether γ of a round may depend on the number of rounds, which a resumed run must then keep."""
        return self.schedule.kind == "cosine" or not isinstance(self.learning_rate, int | float)

    def init(self, x0: Tensor) -> StateT:
        """State before round 1; x0 [m, d] holds the initial models."""
        raise NotImplementedError

    def step(self, state: StateT, r: Round) -> tuple[StateT, Metrics]:
        """Run one round."""
        raise NotImplementedError

    def noise_gain(self, graph: Graph) -> float:
        """Noise that a local step adds to a model in the long run, for "auto".

        It is relative to γ times the noise of the mean of all messages of the step.
        """
        return 1.0

    def check(self, members: int) -> None:
        """Raise PdslError if the algorithm cannot handle a neighbourhood of this many members."""

    def check_task(self, task: Task) -> None:
        """Raise PdslError if the algorithm cannot handle the task."""

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        """Number of vectors sent to each neighbour in a round."""
        return 1

    def releases(self, members: int) -> Release:
        """Messages that an agent with this many members releases in a round, its message to itself included."""
        raise PdslError(
            f"algorithm {self.name} does not declare its messages, so no ε can be computed; define its method"
            " releases, or set privacy.mode=none"
        )

    def releases_in(self, graph: Graph, agent: int) -> Release:
        """`releases` of this agent with all its neighbours, with the relative σ of each message."""
        return self.releases(int(graph.degrees[agent]))


def charged_release(algorithm: Algorithm, graph: Graph, agent: int) -> Release:
    """The release that an agent is charged for in every round.

    On a schedule it is the largest of any round, with one σ for all messages. Guarantee: a round with fewer messages of
    this σ spends no more.
    """
    found = [algorithm.releases_in(of_round, agent) for of_round in graph.distinct]
    if len(found) == 1:
        return found[0]
    return Release(max(release.messages for release in found), max(release.steps for release in found))


@dataclass(frozen=True)
class Models:
    x: Tensor  # [m, d] models


@dataclass(frozen=True)
class ModelsAndMomenta:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
