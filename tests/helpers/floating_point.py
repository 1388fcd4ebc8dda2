"""Attacks on the noise: what floating-point numbers tell a neighbour about one record, whatever ε is claimed.

A message is y = fl(g + fl(σ·n)), a float32, and σ is public. Which y are possible at all depends on g: an attacker who
knows what g is without the record looks for values that this g cannot give (`impossible`). That is the attacker's
knowledge of float32 noise on a float32 gradient; `STATISTICS` presume nothing about how a message is made.

A trial is one message (or a few in a row) of an agent that has the record, or of one that does not. A rule is set to
about 1 % of false alarms by the messages of others that do not have it either.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor

import pdsl
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.muffliato import Muffliato
from pdsl.engine import Engine
from pdsl.engine.base import Replies, ReplyFn, weighted_sum
from pdsl.training.experiment import Experiment
from tests.helpers.experiments import experiment

EPSILON = 0.1  # claimed, for all rounds together
TRIALS = 500  # with the record, as many without, and as many of others without
ALLOWED = 0.05  # |TPR − FPR|
ALARMS = 2  # of the others, on either side, may be further out than a rule's limits
REACH = 6  # float32 numbers on either side that are tried: a few roundings move a number by no more
STRONGEST = 1.45  # times a power of two: the σ that leaves most values out

CLASSES = PIXELS = 32
RECORDS = 6  # of an agent, without the one that is looked for
SATURATING = 1e4  # a weight that makes softmax say exactly 0 and 1

Own = tuple[Tensor, Tensor]  # x, y
Values = NDArray[np.float64]
Arithmetic = Callable[[Tensor], Tensor]  # standard normal numbers → the messages that they give


# Records


def records(agent: int, background: int = 1, count: int = RECORDS) -> Own:
    """Images whose brightest pixel is their class; the last `background` pixels are 0 in all of them."""
    rng = np.random.default_rng(agent)
    y = np.append(0, 1 + rng.permutation(PIXELS - background - 1))[:count]
    x = rng.uniform(0.1, 0.9, (count, PIXELS)).astype(np.float32)
    x[np.arange(count), y] = 2.0
    x[:, PIXELS - background :] = 0.0
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))


def one_more(own: Own) -> Own:
    """The records and one that is grey all over, also where the others are black, and called a 1."""
    x, y = own
    return torch.cat([x, torch.ones(1, PIXELS)]), torch.cat([y, torch.tensor([1])])


def public_records() -> Own:
    """Test set and Q; no attack depends on them."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.0, 1.0, (8, PIXELS)).astype(np.float32)
    return torch.from_numpy(x), torch.arange(CLASSES - 8, CLASSES)


def saturating() -> Tensor:
    """A model so sure of `records` that their gradients are exactly 0."""
    return torch.cat([SATURATING * torch.eye(CLASSES, PIXELS).flatten(), torch.zeros(CLASSES)])


def weights_of(pixels: Sequence[int], classes: Sequence[int] = range(CLASSES)) -> Tensor:
    """The places in a model of the weights that these pixels have in these classes."""
    return (PIXELS * torch.tensor(classes)[:, None] + torch.tensor(pixels)).flatten()


# A neighbour that listens


class Heard(NamedTuple):
    """A vector that reached the attacker."""

    round: int
    maker: int
    message: Tensor  # [d]
    models: Tensor  # [agents, d] everybody's when the round began: they follow from what was sent before
    before: Tensor  # [agents, d] what everybody sent in the exchange before, if there was one in this round


@dataclass
class Ear:
    """What one agent hears in the `exchange`-th exchange of each round, and what it says in the first one."""

    attacker: int = 0
    speech: Callable[[Tensor], Tensor] | None = None  # from what all would send [m, d]; None: it keeps to the protocol
    exchange: int = 0
    heard: list[Heard] = field(default_factory=list)

    def at(self, r: pdsl.Round, models: Tensor) -> pdsl.Round:
        return replace(r, engine=Tapped(r.engine, self, r.t, models))


class Tapped:
    """An engine as its agents know it, but for the attacker: it keeps what it gets, and sends what it likes."""

    def __init__(self, engine: Engine, ear: Ear, t: int, models: Tensor):
        self._engine, self._ear, self._t, self._models = engine, ear, t, models
        self._before = models
        self._exchange = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def request(self, x: Tensor, answer: ReplyFn) -> Iterator[Replies]:
        for at in self._engine.request(self._spoken(x), answer):
            if self._exchange == self._ear.exchange:
                self._hear(at.values, self._engine.receiver[at.edges], self._engine.sender[at.edges])
            yield at
        self._exchange += 1

    def mix(self, x: Tensor) -> Tensor:
        x = self._spoken(x)
        if self._exchange == self._ear.exchange:
            self._hear(self._engine.deliver(x), self._engine.receiver, self._engine.sender)
        self._before = x
        self._exchange += 1
        return self._engine.mix(x)

    def _spoken(self, x: Tensor) -> Tensor:
        if self._exchange or self._ear.speech is None:
            return x
        x = x.clone()
        x[self._ear.attacker] = self._ear.speech(x)
        return x

    def _hear(self, rows: Tensor, receiver: Tensor, sender: Tensor) -> None:
        for e in torch.nonzero((receiver == self._ear.attacker) & (sender != receiver)).flatten().tolist():
            self._ear.heard.append(Heard(self._t, int(sender[e]), rows[e].clone(), self._models, self._before))


class TappedPDSL(pdsl.PDSL):
    _ear: Ear = PrivateAttr(default_factory=Ear)

    def step(self, state: Any, r: pdsl.Round) -> tuple[Any, pdsl.Metrics]:
        return super().step(state, self._ear.at(r, state.x))


class TappedDPSGD(DPSGD):
    _ear: Ear = PrivateAttr(default_factory=Ear)

    def step(self, state: Any, r: pdsl.Round) -> tuple[Any, pdsl.Metrics]:
        return super().step(state, self._ear.at(r, state.x))


class TappedMuffliato(Muffliato):
    _ear: Ear = PrivateAttr(default_factory=Ear)

    def step(self, state: Any, r: pdsl.Round) -> tuple[Any, pdsl.Metrics]:
        return super().step(state, self._ear.at(r, state.x))


TappedAlgorithm = TappedPDSL | TappedDPSGD | TappedMuffliato


def always(model: Tensor) -> Callable[[Tensor], Tensor]:
    """Send this model in every round."""
    return lambda x: model


def steering(model: Tensor) -> Callable[[Tensor], Tensor]:
    """On a full graph, send what makes the mean of all models this one, once the others' are there."""
    return lambda x: (len(x) * model.double() - x[1:].double().sum(0)).float()


# Runs


class Trials(NamedTuple):
    """A number for each trial."""

    with_record: Values
    without: Values
    others: Values

    def rates(self) -> "Rates":
        """Of the rule 'further out, on either side, than nearly all of the others'."""
        others = np.sort(self.others)
        low, high = others[ALARMS], others[-1 - ALARMS]
        return Rates(*(float(((v < low) | (v > high)).mean()) for v in (self.with_record, self.without)))


class Rates(NamedTuple):
    """How often a rule says that the record is there."""

    with_record: float  # TPR
    without: float  # FPR

    @property
    def advantage(self) -> float:
        return abs(self.with_record - self.without)


@dataclass(frozen=True)
class Overheard:
    """All that reached the attacker in a run, a row per message: of each maker in turn, round by round."""

    makers: int  # the first third of them has the record
    messages: Tensor  # [n, d]
    models: Tensor  # [n, d] the maker's own, when the round began
    sigma: float  # of the noise; 0 without
    rate: float = 0.0  # learning rate; 0 where messages are gradients

    def impossible(self, wide: bool) -> Tensor:
        """Which values a gradient of 0 cannot have led to: [n, d]."""
        if self.rate:
            return impossible_models(self.messages, self.models, self.rate, self.sigma, wide)
        return impossible_gradients(self.messages, torch.zeros(()), self.sigma, wide)

    def noisy_gradients(self) -> Tensor:
        """The messages, or as much of the gradients in them as they tell: [n, d]."""
        if self.rate:
            return ((self.models.double() - self.messages.double()) / self.rate).float()
        return self.messages

    def trials(self, values: Values, in_a_row: int = 1, first: int = 0, most: int = TRIALS) -> Trials:
        """The value of each message, by who has the record; so many in a row are added up and make a trial.

        Trials are taken from the `first` on, `most` of them.
        """
        by_maker = values.reshape(3, self.makers // 3, -1, in_a_row).sum(-1)
        return Trials(*(group.T.flatten()[first : first + most] for group in by_maker))


def strongest(sigma: float) -> float:
    """The clipping threshold that an attacker would like best, where a threshold of 1 has this σ."""
    return STRONGEST * 2.0 ** math.floor(math.log2(sigma)) / sigma


def eavesdropped(
    algorithm: TappedAlgorithm,
    graph: pdsl.Graph,
    own: Callable[[int], Own],
    more: Callable[[Own], Own],
    *,
    makers: int,
    rounds: int,
    ear: Ear,
    randomness: str = "system",
    skipped: int = 0,
    batch: int = 64,
    owner: Callable[[int], int] = lambda maker: maker,
    noise: bool = True,
) -> Overheard:
    """Run it at a total ε of 0.1, and keep what agent 0 hears from the agents 1 to `makers` after `skipped` rounds.

    The record is in the part of `owner(maker)`, for the first third of the makers. Without `noise`, in nobody's.
    """
    if isinstance(algorithm, TappedPDSL):  # messages do not depend on the weights that receivers give them
        algorithm = algorithm.model_copy(update={"shapley": pdsl.Shapley(weighting="uniform")})
    algorithm._ear = ear
    having = [owner(maker) for maker in range(1, makers // 3 + 1)]
    data = [more(own(i)) if i in having and noise else own(i) for i in range(graph.agents)]
    if not noise:  # as many records in all, so that sums of gradients are divided by the same
        x, y = data[0]
        size = len(y) + sum(len(more(own(i))[1]) - len(own(i)[1]) for i in having)
        data[0] = (x[torch.arange(size) % len(y)], y[torch.arange(size) % len(y)])
    settings: dict[str, Any] = {
        "graph": graph,
        "algorithm": algorithm,
        "rounds": rounds + skipped,
        "evaluate_every": rounds + skipped,
        "batch": {"size": batch, "records": sum(len(y) for _, y in data) / len(data)},
        "engine": {"workers": 1},
    }
    private = {"target_epsilon": EPSILON, "randomness": randomness}

    def sigma(e: Experiment) -> float:
        return e.sigma[owner(1)] * e.sigma_scale[owner(1)].get(ear.attacker, 1.0)

    unit = experiment("softmax", (data, public_records()), **settings, privacy={**private, "max_grad_norm": 1.0})
    C = strongest(sigma(unit))
    privacy = {**private, "max_grad_norm": C} if noise else {"mode": "none", "max_grad_norm": C}
    result = pdsl.train("softmax", (data, public_records()), **settings, privacy=privacy)
    assert len(result.rows) == rounds + skipped
    assert not noise or (result.epsilon is not None and result.epsilon <= EPSILON)
    ear.heard = sorted((h for h in ear.heard if h.round > skipped), key=lambda h: (h.maker, h.round))
    assert [h.maker for h in ear.heard[::rounds]] == [*range(1, makers + 1)]
    return Overheard(
        makers,
        torch.stack([h.message for h in ear.heard]),
        torch.stack([h.models[h.maker] for h in ear.heard]),
        sigma(result.experiment) if noise else 0.0,
        0.0 if isinstance(algorithm, TappedPDSL) else algorithm.learning_rate,
    )


# What the attacker makes of it


def impossible(messages: Tensor, arithmetic: Arithmetic, guess: Tensor) -> Tensor:
    """Which values no float32 noise near the `guess` gives; all are [n, d].

    `arithmetic` never falls, or never rises, with the noise, so that no other noise gives them either.
    """
    n = guess.float()
    for _ in range(REACH):
        n = torch.nextafter(n, torch.tensor(-math.inf))
    possible = torch.zeros_like(messages, dtype=torch.bool)
    for _ in range(2 * REACH + 1):
        possible |= arithmetic(n) == messages
        n = torch.nextafter(n, torch.tensor(math.inf))
    return ~possible


def noisy(g: Tensor, sigma: float, n: Tensor, wide: bool) -> Tensor:
    """What noise makes of gradients: all in float32, or product and sum in float64 and rounded once."""
    return (g.double() + sigma * n.double()).float() if wide else g + sigma * n


def impossible_gradients(y: Tensor, g: Tensor, sigma: float, wide: bool = False) -> Tensor:
    """Values that noise cannot make of the gradients g."""
    return impossible(y, lambda n: noisy(g, sigma, n, wide), (y.double() - g.double()) / sigma)


def impossible_models(y: Tensor, x: Tensor, rate: float, sigma: float, wide: bool = False) -> Tensor:
    """Values that a step from the models x cannot lead to where the gradient is 0."""
    guess = (x.double() - y.double()) / (rate * sigma)
    return impossible(y, lambda n: x - rate * noisy(torch.zeros(()), sigma, n, wide), guess)


def impossible_mixtures(
    y: Tensor, x: Tensor, rate: float, sigma: float, known: Sequence[Tensor], weights: Sequence[float], wide: bool
) -> Tensor:
    """The same where `known` rows and that step, the last row, were mixed with these weights."""
    others = weighted_sum(known, weights[:-1])
    step = (y.double() - others.double()) / weights[-1]

    def arithmetic(n: Tensor) -> Tensor:
        return weighted_sum([*known, x - rate * noisy(torch.zeros(()), sigma, n, wide)], weights)

    return impossible(y, arithmetic, (x.double() - step) / (rate * sigma))


def counts(found: Tensor) -> Values:
    """How many in each row."""
    return found.sum(1).double().numpy()


def _bits(y: Tensor) -> NDArray[np.uint32]:
    return y.contiguous().numpy().view(np.uint32)


def _trailing_zeros(y: Tensor) -> NDArray[np.int64]:
    """Of each mantissa; 23 where it has no other digits."""
    mantissa = (_bits(y) & 0x7FFFFF).astype(np.int64) | 1 << 23
    return np.asarray(np.log2(mantissa & -mantissa), dtype=np.int64)


def _off_lattice(y: Tensor, sigma: float) -> Values:
    """How far y/σ is from the next float32, in units of its last place."""
    ratio = y.double().numpy() / sigma
    nearest = ratio.astype(np.float32)
    distance: Values = np.abs(ratio - nearest) / np.spacing(np.abs(nearest)).astype(np.float64)
    return distance


def _off_grid(y: Tensor, sigma: float, bits: int) -> NDArray[np.bool_]:
    """Whether it is no multiple of the power of two so many bits below σ."""
    steps = y.double().numpy() / 2.0 ** (math.floor(math.log2(sigma)) - bits)
    return np.asarray(steps != np.round(steps))


Statistic = Callable[[Tensor, float], Values]  # noisy gradients [n, d] and σ → a number for each

STATISTICS: dict[str, Statistic] = {
    "odd numbers": lambda y, sigma: (_bits(y) & 1).mean(1),
    "trailing zeros": lambda y, sigma: _trailing_zeros(y).mean(1),
    "eight trailing zeros": lambda y, sigma: (_trailing_zeros(y) >= 8).mean(1),
    "commonest last byte": lambda y, sigma: np.array([np.bincount(row & 0xFF).max() for row in _bits(y)]),
    "distance from the lattice": lambda y, sigma: _off_lattice(y, sigma).mean(1),
    "far from the lattice": lambda y, sigma: (_off_lattice(y, sigma) > 0.4).mean(1),
    "off a grid of 12 bits": lambda y, sigma: _off_grid(y, sigma, 12).mean(1),
    "off a grid of 16 bits": lambda y, sigma: _off_grid(y, sigma, 16).mean(1),
    "off a grid of 20 bits": lambda y, sigma: _off_grid(y, sigma, 20).mean(1),
    "off a grid of 24 bits": lambda y, sigma: _off_grid(y, sigma, 24).mean(1),
    "zeros": lambda y, sigma: (_bits(y) == 0).mean(1),
    "negative zeros": lambda y, sigma: (_bits(y) == 1 << 31).mean(1),
    "nearly nothing": lambda y, sigma: counts(y.abs() < 1e-30),
    "the smallest": lambda y, sigma: y.abs().amin(1).double().numpy(),
    "equal values": lambda y, sigma: np.array([len(row) - len(np.unique(row)) for row in _bits(y)]),
}


def features(y: Tensor, sigma: float) -> Values:  # [n, features]
    """What a classifier may learn from: how often each bit is set, and all statistics."""
    bits = [(_bits(y) >> b & 1).mean(1) for b in range(32)]
    return np.column_stack([*bits, *(statistic(y, sigma) for statistic in STATISTICS.values())])
