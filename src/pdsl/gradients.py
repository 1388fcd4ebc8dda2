"""Cross-gradients g[i,j] = ∇F_i(x_j; ξ_i), clipped: what agent i computes on its own batch for neighbour j.

Two ways to clip (equations 9 and 12 of the paper, and the one that makes privacy cheap):

- `batch`: the whole batch's gradient is scaled down to norm C. One record can move it by up to 2C.
- `per-sample`: each record's gradient is scaled down to norm C before they are summed. One record moves the result
  by at most C/B.

In both, the sum over records is divided by a public constant, never by the number drawn.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, one_hot, pad

from pdsl.data.batches import Batches
from pdsl.models import Network, channels_last
from pdsl.parallel import Workers

GRADIENT_BLOCK = 250  # records per backward pass of per-sample clipping; bounds memory
VMAP_LOCK = threading.Lock()  # torch.func's transforms are not safe to use from two threads at once


def clip_factors(squared_norms: Tensor, C: float) -> Tensor:
    """1 / max(1, ‖g‖/C) for each squared norm (float64).

    Guarantee: factor · ‖g‖ ≤ C for every finite norm. A non-finite norm must not get here.
    """
    return C / squared_norms.sqrt().clamp(min=C)


def summed_gradient(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """The gradient [d] of the sum of the records' losses, as it is."""
    replica = network.replica()
    loss = cross_entropy(replica.load(x)(inputs), labels, reduction="sum")
    by_parameter = torch.autograd.grad(loss, replica.parameters, materialize_grads=True)  # zero where not used
    return torch.cat([p.reshape(-1) for p in by_parameter])


def batch_clipped(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float) -> Tensor:
    """The gradient [d] of the batch's loss sum over `divisor`, as a whole clipped to norm C.

    Guarantee: finite, norm at most C. An empty batch or a gradient with a non-finite entry gives zero; so does a
    batch of one record under BatchNorm, which has no statistics.
    """
    if len(labels) == 0 or (len(labels) == 1 and network.mixes_records):
        return torch.zeros_like(x)
    g = summed_gradient(network, x, inputs, labels) / divisor
    squared_norm = g.double().square().sum()
    if not torch.isfinite(squared_norm):
        return torch.zeros_like(x)
    return g * clip_factors(squared_norm, C).float()


PerSample = Callable[[Network, Tensor, Tensor, Tensor, float], Tensor]


def per_sample_clipped(
    network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float, clipped_sum: PerSample
) -> Tensor:
    """The sum of the records' gradients, each clipped to norm C, over `divisor`: [d].

    Guarantee: adding or removing one record moves the result by at most C/divisor. An empty batch gives zero; a
    record whose gradient has a non-finite entry counts as zero.
    """
    total = torch.zeros_like(x)
    if len(labels) == 0:
        return total
    blocks = zip(torch.split(inputs, GRADIENT_BLOCK), torch.split(labels, GRADIENT_BLOCK), strict=True)
    for a, b in blocks:
        total += clipped_sum(network, x, a, b, C)
    return total / divisor


def clipped_sum_by_layers(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
    """Sum of clipped per-record gradients of a network of linear and convolution layers, in one backward pass.

    With a layer's input a and the loss's derivative δ by its output, a record's gradient is the product of the two:
    its norm is known without an extra pass, and a linear layer's is never even built. That is the whole gradient only
    if every layer runs once and what it took and gave is left as it was; RuntimeError if not.
    """
    replica = network.replica()
    module = replica.load(x)
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    versions: list[tuple[int, int]] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if not out.requires_grad:
            out.requires_grad_()
        seen.append((layer, args[0].detach(), out))
        versions.append((args[0]._version, out._version))

    # With the parameters out of the graph, only derivatives by the layers' outputs are computed.
    for p in replica.parameters:
        p.requires_grad_(False)
    hooks = [layer.register_forward_hook(record) for layer in module.modules() if _has_own_parameters(layer)]
    try:
        loss = cross_entropy(module(inputs), labels, reduction="sum")
        deltas = torch.autograd.grad(loss, [out for _, _, out in seen])
    finally:
        for hook in hooks:
            hook.remove()
        for p in replica.parameters:
            p.requires_grad_(True)

    if [(a._version, out._version) for _, a, out in seen] != versions:
        raise RuntimeError("a layer's input or output was changed in place")
    parts = [part for (layer, a, _), delta in zip(seen, deltas, strict=True) for part in _by_parameter(layer, a, delta)]
    if sorted(id(part.parameter) for part in parts) != sorted(id(p) for p in replica.parameters):
        raise RuntimeError("a layer was run twice, or not at all")
    squared_norms = torch.stack([part.squared_norms for part in parts]).sum(0)
    finite = torch.isfinite(squared_norms)
    if not finite.all():
        if not finite.any():
            return torch.zeros_like(x)
        return clipped_sum_by_layers(network, x, inputs[finite], labels[finite], C)
    factors = clip_factors(squared_norms, C).float()
    sums = {id(part.parameter): part.sum(factors) for part in parts}
    return torch.cat([sums[id(p)].reshape(-1) for p in replica.parameters])


@dataclass(frozen=True)
class _PerRecord:
    """The gradients of one parameter, one per record, as far as they need to be known."""

    parameter: Tensor
    squared_norms: Tensor  # [n] float64
    sum: Callable[[Tensor], Tensor]  # Σ_r f_r g_r, given factors f [n]


def _rows(parameter: Tensor, g: Tensor) -> _PerRecord:
    """Gradients that are there, a row each [n, size]."""
    return _PerRecord(parameter, g.double().square().sum(1), lambda f: f @ g)


def _outer(parameter: Tensor, delta: Tensor, a: Tensor) -> _PerRecord:
    """Gradients δ_r a_rᵀ, which need not be built: the norm is a product of norms, the sum a matrix product."""
    squared_norms = a.double().square().sum(1) * delta.double().square().sum(1)
    return _PerRecord(parameter, squared_norms, lambda f: (delta * f[:, None]).T @ a)


def _by_parameter(layer: nn.Module, a: Tensor, delta: Tensor) -> list[_PerRecord]:
    """From a layer's input and the loss's derivative by its output to the gradients of its weight and bias."""
    n = len(delta)
    if isinstance(layer, nn.Linear) and a.ndim == 2:
        weight = _outer(layer.weight, delta, a)
        bias = delta
    elif isinstance(layer, nn.Conv2d):
        delta = delta.permute(0, 2, 3, 1)  # [n, rows, columns, out]
        weight = _by_windows(layer, _at_every_pixel(layer, a, delta))
        bias = delta.sum((1, 2))
    else:  # a linear layer over a sequence: positions play the part of pixels
        delta = delta.reshape(n, -1, delta.shape[-1])
        positions = a.reshape(n, -1, a.shape[-1])
        weight = _rows(cast(Tensor, layer.weight), torch.bmm(delta.transpose(1, 2), positions).reshape(n, -1))
        bias = delta.sum(1)
    return [weight] if layer.bias is None else [weight, _rows(cast(Tensor, layer.bias), bias)]


def _at_every_pixel(layer: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    """Gradients [n, out, k·k·channels] of a kernel: what it saw at each pixel times δ there, summed over pixels.

    What it saw overlaps, and copying it all out is most of the work. Of one channel, each place in the kernel has a
    picture of its own. Of several, only the places side by side are copied, and one product per row of the kernel is
    taken.
    """
    assert not isinstance(layer.padding, str)
    n, height, width, out = delta.shape
    (above, beside), (down, right), (rows_apart, columns_apart) = layer.padding, layer.stride, layer.dilation
    seen = pad(a, (beside, beside, above, above)).permute(0, 2, 3, 1)  # channels innermost, as they lie in memory
    rows = [slice(r, r + height * down, down) for r in range(0, layer.kernel_size[0] * rows_apart, rows_apart)]
    columns = [
        slice(c, c + width * right, right) for c in range(0, layer.kernel_size[1] * columns_apart, columns_apart)
    ]
    if layer.in_channels == 1:
        pictures = torch.stack([seen[:, r, c, 0] for r in rows for c in columns], dim=1)
        return torch.bmm(pictures.flatten(2), delta.reshape(n, -1, out)).transpose(1, 2)
    spanned = columns[-1].start + 1
    side_by_side = seen.unfold(2, spanned, right)[..., ::columns_apart].transpose(3, 4)
    strips = side_by_side.reshape(n, seen.shape[1], width, -1)  # [n, rows, columns, k·channels]
    delta = delta.reshape(n, -1, out).transpose(1, 2)
    by_row = [torch.bmm(delta, strips[:, r].reshape(n, height * width, -1)) for r in rows]
    return torch.stack(by_row, dim=2).flatten(2)


def _by_windows(layer: nn.Conv2d, g: Tensor) -> _PerRecord:
    """Gradients [n, out, k·k·channels] of a kernel, brought into its own order only when they have been summed."""
    out, channels, height, width = layer.weight.shape
    rows = g.reshape(len(g), -1)

    def total(factors: Tensor) -> Tensor:
        return (factors @ rows).view(out, height, width, channels).permute(0, 3, 1, 2)

    return _PerRecord(layer.weight, rows.double().square().sum(1), total)


def clipped_sum_by_vmap(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
    """The same for any module that torch.func can trace, one full gradient per record."""
    replica = network.replica()
    module = replica.load(x)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(module, parameters, (record[None],)), label[None])

    with VMAP_LOCK:
        rows = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
    g = torch.cat([rows[name].reshape(len(labels), -1) for name in parameters], dim=1)
    squared_norms = g.double().square().sum(1)
    finite = torch.isfinite(squared_norms)
    g, squared_norms = g[finite], squared_norms[finite]
    return clip_factors(squared_norms, C).float() @ g


def _has_own_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(recurse=False), None) is not None


def clipped_sum_by_records(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
    """The same for any module at all, one backward pass per record."""
    total = torch.zeros_like(x)
    for n in range(len(labels)):
        total += batch_clipped(network, x, inputs[n : n + 1], labels[n : n + 1], C, divisor=1.0)
    return total


def choose_per_sample(network: Network, inputs: Tensor, labels: Tensor) -> PerSample:
    """The fastest way that is right for this module, found out by trying it on a few public records.

    A module may call a layer twice, share a weight, or use a parameter outside a layer: then derivatives by layer are
    not the whole gradient. Another may hold what torch.func cannot trace.
    """
    if network.mixes_records:
        return clipped_sum_by_records  # nobody's to call: a record has no gradient of its own
    few = slice(0, 3)
    x = network.elsewhere()
    C = 1e-3  # so small that every record is clipped, and none outweighs another
    right = clipped_sum_by_records(network, x, inputs[few], labels[few], C)
    for candidate in (clipped_sum_by_layers, clipped_sum_by_vmap):
        if candidate is clipped_sum_by_layers and not _only_plain_layers(network):
            continue
        try:
            found = candidate(network, x, inputs[few], labels[few], C)
        except Exception:  # a user's module that cannot be hooked or traced may fail in any way
            continue
        if _agree(network, found, right):
            return candidate
    return clipped_sum_by_records


def _agree(network: Network, found: Tensor, right: Tensor) -> bool:
    """Equal but for rounding, in each parameter by itself: the largest must not hide the others."""
    sizes = [shape.numel() for _, shape in network.shapes()]
    rounding = 1e-5 * right.norm()
    return all(
        bool((f - r).norm() <= 1e-3 * r.norm() + rounding)
        for f, r in zip(torch.split(found, sizes), torch.split(right, sizes), strict=True)
    )


def _only_plain_layers(network: Network) -> bool:
    """Every parameter is a linear layer's or an ordinary convolution's, and belongs to one layer only."""
    layers = [m for m in network.module.modules() if _has_own_parameters(m)]
    owned = sum(p.numel() for m in layers for p in m.parameters(recurse=False))
    return owned == network.d and all(type(m) is nn.Linear or (type(m) is nn.Conv2d and _is_plain(m)) for m in layers)


def _is_plain(m: nn.Conv2d) -> bool:
    zeros_around = m.padding_mode == "zeros" and not isinstance(m.padding, str)
    return zeros_around and m.groups == 1


Asked = tuple[int, int, int, bytes]  # round, local step, agent, digest of the model


@dataclass(frozen=True)
class Owners:
    """The agents' own side: their records, which nobody else sees, and clipped gradients on a batch of them."""

    network: Network
    inputs: list[Tensor]  # per agent [n_i, ...]
    labels: list[Tensor]  # per agent [n_i]
    batches: Batches
    clipping: str
    C: float
    workers: Workers
    per_sample: PerSample
    repeated: dict[Asked, Tensor] = field(default_factory=dict)  # what the last call was asked for more than once

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Clipped gradients [rows, d]: row e is agents[e]'s, on its batch ξ of round t, at the model x[e].

        Each local step of a round has a batch of its own. With teachers[e], a record's loss has the distance to what
        that model says about the record added to it. A row that asks an agent for the same model again (all models
        are equal on a full graph) is computed once, in this call and the next.
        """
        asked = x if teachers is None else torch.cat([x, teachers], dim=1)
        keys = [(t, step, agent, digest) for agent, digest in zip(agents.tolist(), row_digests(asked), strict=True)]
        first = {key: row for row, key in reversed(list(enumerate(keys)))}

        def one(row: int) -> Tensor:
            agent = int(agents[row])
            batch = self.batches.draw(agent, t, step)
            inputs, targets = self.inputs[agent][batch], self.labels[agent][batch]
            if teachers is not None and len(batch):
                targets = taught(targets, self.network.logits(teachers[row], inputs))
            return self.on(x[row], inputs, targets, self.batches.divisor(agent))

        known = {key: self.repeated[key] for key in first if key in self.repeated}
        new = [key for key in first if key not in known]
        g = known | dict(zip(new, self.workers.map(one, [first[key] for key in new]), strict=True))
        self.repeated.clear()
        self.repeated.update({key: g[key] for key, count in Counter(keys).items() if count > 1})
        return torch.stack([g[key] for key in keys])

    def on(self, x: Tensor, inputs: Tensor, labels: Tensor, divisor: float) -> Tensor:
        """The clipped gradient [d] of these records at the model x [d]."""
        if self.clipping == "batch":
            return batch_clipped(self.network, x, channels_last(inputs), labels, self.C, divisor)
        return per_sample_clipped(self.network, x, channels_last(inputs), labels, self.C, divisor, self.per_sample)


def taught(labels: Tensor, teacher: Tensor) -> Tensor:
    """Targets [n, classes] with which cross-entropy is, up to a constant, −log p(label) + KL(teacher ‖ p).

    Both terms are a record's own, so clipping its gradient bounds both together.
    """
    said = teacher.softmax(-1)
    return said + one_hot(labels, said.shape[-1])


def row_digests(x: Tensor) -> list[bytes]:
    """A digest per row; equal digests mean equal rows."""
    rows = x.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
