"""The data game: value of a coalition of parties, by training a head on public records weighted by their masses.

A coalition's records are imitated by public records: each has the mass of its group in the coalition. The last linear
layer is trained on them as the run trained it: clipped gradients, the same learning rates and momentum. For a model
with one layer of weights this is the whole model. For deeper models the layers below are those of the final model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pdsl.gradients.clipping import clip_factors
from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import CoalitionPlan, Values, draw_orders, exact, monte_carlo
from pdsl.shapley.last_layer import LastLayer
from pdsl.tasks import Task
from pdsl.utils.inputs import Inputs

MAX_EXACT_PARTIES = 7  # up to which all coalitions are trained; for more, two circles of permutations
CIRCLES = 2
CHUNK = 2**24  # numbers of the outputs of all coalitions that are held at once


@dataclass(frozen=True)
class Head:
    """The last linear layer of a model, and its inputs for some records."""

    features: Tensor  # [n, f] with a column of ones if the layer has a bias
    initial: Tensor  # [c, f] weights before training
    whole: bool  # whether the model has no other trained parameters

    @cached_property
    def norms(self) -> Tensor:
        """Norm of each record's features [n], float64."""
        norms: Tensor = self.features.double().norm(dim=1)
        return norms


def make_head(layer: LastLayer, x0: Tensor, x: Tensor, inputs: Inputs) -> Head:
    """The last layer at the final model x [d]; x0: the initial model."""
    features, initial = layer.features(x, inputs).cpu(), layer.part(x0[None])[0].cpu()
    return Head(features, initial if layer.whole else torch.zeros_like(initial), layer.whole)


@dataclass(frozen=True)
class DataGame:
    """Values of coalitions on the public set, in units of the task's headline metric; larger is better."""

    head: Head
    labels: Tensor  # [n] targets of the public records
    groups: Tensor  # [n] group of each record
    task: Task
    learning_rates: Sequence[float]
    momentum: float
    C: float

    def values(self, masses: Values, coalitions: Sequence[int]) -> Values:
        """Value of each coalition (a bit mask) of parties with masses [parties, G]."""
        member = np.array([[mask >> j & 1 for j in range(len(masses))] for mask in coalitions], dtype=np.float64)
        shares = member / np.maximum(member.sum(1, keepdims=True), 1)
        counts = np.bincount(self.groups.numpy(), minlength=masses.shape[1])
        per_record = (shares @ masses / np.maximum(counts, 1))[:, self.groups.numpy()]  # [coalitions, n]
        rows = max(1, CHUNK // (len(self.labels) * len(self.head.initial)))
        chunks = [self._scores(torch.from_numpy(per_record[a : a + rows])) for a in range(0, len(coalitions), rows)]
        return np.concatenate(chunks)

    def _scores(self, masses: Tensor) -> Values:
        """Score of the head trained on each row of masses of the records [coalitions, n]."""
        weights = self._train(masses.float())
        outputs = torch.einsum("scf,nf->snc", weights, self.head.features)
        scores = np.array([self.task.score(of, self.labels) for of in outputs])
        return scores if self.task.higher_is_better else -scores

    def _train(self, masses: Tensor) -> Tensor:
        """Weights [coalitions, c, f] after the run's steps on weighted records."""
        h = self.head.features
        w = self.head.initial.repeat(len(masses), 1, 1)
        velocity = torch.zeros_like(w)
        targets = self.labels.repeat(len(masses), *(1 for _ in self.labels.shape[1:]))
        for rate in self.learning_rates:
            outputs = torch.einsum("scf,nf->snc", w, h).requires_grad_()
            losses = self.task.losses(outputs.flatten(0, 1), targets).sum()
            (residuals,) = torch.autograd.grad(losses, outputs)
            squared = (residuals.double().norm(dim=2) * self.head.norms) ** 2
            factors = clip_factors(squared, self.C).float() * masses
            velocity = self.momentum * velocity + torch.einsum("snc,nf->scf", residuals * factors[..., None], h)
            w = w - rate * velocity
        return w.detach()


def plan_coalitions(parties: int, generator: np.random.Generator) -> CoalitionPlan:
    """All coalitions of few parties; of more, those of two circles of permutations (`draw_orders`)."""
    if parties <= MAX_EXACT_PARTIES:
        return exact(parties)
    settings = ShapleySettings(permutations=CIRCLES * 2 * parties)
    return monte_carlo(draw_orders(parties, settings, generator))
