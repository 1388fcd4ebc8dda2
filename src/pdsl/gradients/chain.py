"""Per-record gradients of a chain of linear layers and activations, by an explicit backward pass.

The products are those of `linear` and `formulas`, padded and rounded in the same way, and the sum is computed in
float64. Only the many small operations of a tape and of autograd are saved: in a perceptron with one hidden layer they
take a tenth of the time. Weight and bias of a layer share one conversion to float64: with δ the loss's derivative at
the layer's output and a the layer's input, their squared norm is ‖δ‖²(‖a‖² + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from pdsl.gradients.formulas import Block, Flat, PerRecord, Vectors
from pdsl.models.network import Replica
from pdsl.models.zoo import ALIGNMENT, AlignedLinear, Flatten, Tanh
from pdsl.tasks import MultiClass, Task

Use = tuple[Tensor, Tensor, bool]  # of a linear layer: δ [n, out] and a [n, in] in float64, whether it has a bias
LINEAR = (nn.Linear, AlignedLinear)
FLATTEN = (nn.Flatten, Flatten)
# Activations whose derivative is a function of their output: (δ, output) → δ at the input, as in torch's own backward.
DERIVATIVES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda delta, y: torch.ops.aten.threshold_backward.default(delta, y, 0),
    nn.Sigmoid: torch.ops.aten.sigmoid_backward.default,
    nn.Tanh: torch.ops.aten.tanh_backward.default,
    Tanh: torch.ops.aten.tanh_backward.default,
}


@dataclass(frozen=True)
class Chain:
    """Flattening of the input, then linear layers and activations."""

    flatten: list[nn.Module]
    steps: list[nn.Module]  # the first is linear

    @torch.no_grad()
    def gradients(self, task: Task, x: Tensor, records: Block) -> PerRecord | None:
        """Gradients of records with respect to all parameters x [d]; None if a flattened record is not a vector."""
        flat = records.flat or self._flatten(records)
        if flat is None:
            return None
        values, weights = [flat.padded], []
        for step in self.steps:
            a = values[-1]
            if isinstance(step, nn.Linear):
                weight, bias, x = _split(step, x)
                weights.append(weight)
                values.append(_set_width(linear(_set_width(a, weight.shape[1]), weight, bias), step.out_features))
            else:
                values.append(step.forward(a))
        delta = _derivative(task, values[-1], records.targets)
        return self._backward(values, weights, delta, flat.vectors)

    def _flatten(self, records: Block) -> Flat | None:
        """Inputs as vectors, kept in the block for other models; None if a flattened record is not a vector."""
        inputs = records.inputs
        if not isinstance(inputs, Tensor):
            return None
        for layer in self.flatten:
            inputs = layer.forward(inputs)
        if inputs.ndim != 2 or len(inputs) != len(records.targets):
            return None
        width = inputs.shape[1] + -inputs.shape[1] % ALIGNMENT
        records.flat = Flat(_set_width(inputs, width), Vectors(inputs))
        return records.flat

    def _backward(self, values: list[Tensor], weights: list[Tensor], delta: Tensor, inputs: Vectors) -> PerRecord:
        """Backward pass from the loss's derivative at the output. `values` are the input and each step's output."""
        squared_norms: Tensor | None = None
        uses: list[Use] = []
        for step in reversed(self.steps):
            y, a = values.pop(), values[-1]
            if not isinstance(step, nn.Linear):
                delta = DERIVATIVES[type(step)](delta, y)
                continue
            weight = weights.pop()
            of_delta, of_a = Vectors(delta), Vectors(a) if weights else inputs
            has_bias = step.bias is not None
            squares = of_a.norms.square()
            squares = (squares.add_(1.0) if has_bias else squares).mul_(of_delta.norms.square())
            squared_norms = squares if squared_norms is None else squared_norms.add_(squares)
            uses.append((of_delta.finite, of_a.finite, has_bias))
            if weights:
                delta = _set_width(torch.mm(_set_width(delta, len(weight)), weight), step.in_features)
        assert squared_norms is not None
        return PerRecord(squared_norms, lambda factors: _weighted_sum(uses[::-1], factors))


def chain_of(replica: Replica) -> Chain | None:
    """The replica's module as a chain; None if it is not one, or if not every parameter is trained and used once."""
    if type(replica.module) is not nn.Sequential:
        return None
    modules = _flat(replica.module)
    first = next((place for place, m in enumerate(modules) if type(m) in LINEAR), len(modules))
    flatten, steps = modules[:first], modules[first:]
    own = [p for step in steps for p in step.parameters(recurse=False)]
    right = (
        all(type(m) in FLATTEN for m in flatten)
        and all(type(m) in LINEAR or type(m) in DERIVATIVES for m in steps)
        and [id(p) for p in own] == [id(p) for p in replica.parameters]
    )
    return Chain(flatten, steps) if right else None


def _flat(sequence: nn.Sequential) -> list[nn.Module]:
    """Layers in the order of their calls: a layer that is called twice is listed twice."""
    return [m for layer in sequence for m in (_flat(layer) if type(layer) is nn.Sequential else [layer])]


def _split(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weight and bias at the start of a flat vector, padded like `aligned_linear`, and the rest of the vector."""
    outputs, inputs = layer.weight.shape
    columns, rows = -inputs % ALIGNMENT, -outputs % ALIGNMENT
    weight, x = x[: outputs * inputs].view(outputs, inputs), x[outputs * inputs :]
    if columns or rows:
        weight = pad(weight, (0, columns, 0, rows))
    if layer.bias is None:
        return weight, None, x
    return weight, pad(x[:outputs], (0, rows)) if rows else x[:outputs], x[outputs:]


def _set_width(rows: Tensor, width: int) -> Tensor:
    """Rows cut, or padded with zeros, to this width."""
    missing = width - rows.shape[1]
    return rows if not missing else rows[:, :width] if missing < 0 else pad(rows, (0, missing))


def _derivative(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Derivative of each record's loss at its outputs. For plain cross-entropy it is softmax − one-hot."""
    plain = type(task) is MultiClass and task.loss is None and task.weights is None and not task.label_smoothing
    if plain and targets.ndim == 1 and targets.dtype == torch.int64:
        by_class = outputs.T.softmax(0)  # torch's softmax over the few numbers of a row takes three times as long
        return by_class.scatter_(0, targets[None], -1.0, reduce="add").T.contiguous()
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        return torch.autograd.grad(task.losses(leaf, targets).sum(), leaf)[0]


def _weighted_sum(uses: list[Use], factors: Tensor) -> Tensor:
    """Σ_r f_r δ_r a_rᵀ and Σ_r f_r δ_r of each layer in float64, in the order of the flat vector."""
    n, end = len(factors), 0
    d = sum(delta.shape[1] * (a.shape[1] + has_bias) for delta, a, has_bias in uses)
    total = torch.empty(d, dtype=torch.float64, device=factors.device)
    column, row = factors[:, None], factors[None]
    for delta, a, has_bias in uses:
        delta, a, out, inputs = delta[:n], a[:n], delta.shape[1], a.shape[1]
        start, end = end, end + out * inputs
        torch.mm((delta * column).T, a, out=total[start:end].view(out, inputs))
        if has_bias:
            start, end = end, end + out
            torch.mm(row, delta, out=total[start:end][None])
    return total
