"""Per-record gradient kernels: each record's squared gradient norm, and any weighted sum of the gradients.

A record's gradient has the same bits whatever the other records of its batch are: batches are padded to a few sizes,
or to one; `independence` tests this on public records; and sums over records are computed in float64.

| kernel    | for                                                     | why records do not mix                         |
|-----------|---------------------------------------------------------|------------------------------------------------|
| `layers`  | linear and plain convolution layers among vetted layers | every layer works record by record             |
| `vmapped` | any module that torch.func can trace                    | the module is given one record at a time       |
| `records` | any module                                              | the same; a module that keeps state is refused |

The kernels are listed from fast to general.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import pad

from pdsl.models.network import Network, main_output
from pdsl.tasks import VMAP_LOCK
from pdsl.utils.inputs import Fields, Inputs, call, map_inputs, split, tensors_of

PAD = 16  # records; matrix products with a multiple of PAD rows usually round every row alike
ONE_SHAPE = 64  # records; the only block size for modules whose rounding depends on the size


@dataclass(frozen=True)
class PerRecord:
    """Per-record gradients of one or several parameters, as their norms and weighted sums."""

    squared_norms: Tensor  # [n] float64
    # (factors f [n], mask of zero factors [n, 1]) → Σ_r f_r g_r [size] float64; masked rows may be infinite
    sum_of: Callable[[Tensor, Tensor], Tensor]

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self.sum_of(factors, (factors == 0)[:, None])


@dataclass(frozen=True)
class Kernel:
    """A method to compute per-record gradients."""

    name: str
    block: int  # records per call; bounds memory
    pad: int  # records; blocks are padded with zeros to a multiple of this
    run: Callable[[Network, Tensor, Inputs, Tensor], list[PerRecord]]  # (network, x [d], inputs, targets)
    outputs: Callable[[Network, Tensor, Inputs], Tensor]  # (network, x [d], inputs), each record independently

    @property
    def with_one_shape(self) -> "Kernel":
        """Copy with a single block size, for modules whose rounding depends on the size."""
        return replace(self, name=f"{self.name}, one shape", block=ONE_SHAPE, pad=ONE_SHAPE)

    def gradients(self, network: Network, x: Tensor, inputs: Inputs, targets: Tensor) -> PerRecord:
        """Gradients of a block of records with respect to all parameters, padded as the kernel requires."""
        n = len(inputs)
        padded = map_inputs(lambda tensor: pad_records(tensor, self.pad), inputs)
        parts = self.run(network, x, padded, pad_records(targets, self.pad))
        squared_norms = torch.stack([part.squared_norms for part in parts]).sum(0)

        def sum_of(factors: Tensor, dropped: Tensor) -> Tensor:
            if n < len(squared_norms):
                factors = pad(factors, (0, len(squared_norms) - n))
                dropped = pad(dropped, (0, 0, 0, len(squared_norms) - n), value=True)
            return torch.cat([part.sum_of(factors, dropped) for part in parts])

        return PerRecord(squared_norms[:n], sum_of)


def pad_records(rows: Tensor, multiple: int) -> Tensor:
    """Pad with zero records to a multiple."""
    missing = -len(rows) % multiple
    if not missing:
        return rows
    padded = rows.new_zeros((len(rows) + missing, *rows.shape[1:]))
    if rows.ndim == 4:
        padded = padded.to(memory_format=torch.channels_last)
    padded[: len(rows)] = rows
    return padded


# layers


def _by_layers(network: Network, x: Tensor, inputs: Inputs, targets: Tensor) -> list[PerRecord]:
    """Gradients of a network of linear and convolution layers, in one backward pass.

    A record's gradient is the product of the layer's input a and the derivative δ of the loss with respect to the
    layer's output. So its norm needs no extra pass, and a linear layer's gradient is never built. This is the whole
    gradient only if every layer runs once and its input and output are not changed in place; otherwise RuntimeError.
    """
    replica = network.replica()
    module = replica.load(x)
    runs: list[tuple[nn.Module, Tensor, Tensor]] = []
    versions: list[tuple[int, int]] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if not out.requires_grad:
            out.requires_grad_()
        runs.append((layer, args[0].detach(), out))
        versions.append((args[0]._version, out._version))

    # With the parameters out of the graph, only derivatives with respect to the layers' outputs are computed.
    hooks = [layer.register_forward_hook(record) for layer in module.modules() if has_own_parameters(layer)]
    for p in replica.parameters:
        p.requires_grad_(False)
    try:
        loss = network.losses(module, inputs, targets).sum()
        deltas = torch.autograd.grad(loss, [out for _, _, out in runs])
    finally:
        for hook in hooks:
            hook.remove()
        for p in replica.parameters:
            p.requires_grad_(True)

    if [(a._version, out._version) for _, a, out in runs] != versions:
        raise RuntimeError("a layer's input or output was changed in place")
    parts = [part for (layer, a, _), delta in zip(runs, deltas, strict=True) for part in _of_layer(layer, a, delta)]
    parts = [(parameter, part) for parameter, part in parts if id(parameter) in {id(p) for p in replica.parameters}]
    by_parameter = {id(parameter): part for parameter, part in parts}
    if len(by_parameter) != len(parts) or by_parameter.keys() != {id(p) for p in replica.parameters}:
        raise RuntimeError("a layer was run twice, or not at all")
    return [by_parameter[id(p)] for p in replica.parameters]


def _rows(g: Tensor, order: Callable[[Tensor], Tensor] = lambda total: total) -> PerRecord:
    """Gradients given as rows [n, size]; `order` permutes their sum into the parameter's layout."""
    rows = g.double()
    return PerRecord(rows.square().sum(1), lambda f, dropped: order(f @ rows.masked_fill(dropped, 0.0)).reshape(-1))


def _outer(delta: Tensor, a: Tensor) -> PerRecord:
    """Gradients δ_r a_rᵀ without building them: the norm is a product of norms, the sum a matrix product."""
    delta, a = delta.double(), a.double()
    squared_norms = a.square().sum(1) * delta.square().sum(1)

    def sum_of(factors: Tensor, dropped: Tensor) -> Tensor:
        scaled = delta.masked_fill(dropped, 0.0).mul_(factors[:, None])
        return (scaled.T @ a.masked_fill(dropped, 0.0)).reshape(-1)

    return PerRecord(squared_norms, sum_of)


def _of_layer(layer: nn.Module, a: Tensor, delta: Tensor) -> list[tuple[Tensor, PerRecord]]:
    """Gradients of a layer's weight and bias, from its input a and the loss's derivative δ at its output."""
    n = len(delta)
    weight, bias = cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)
    if isinstance(layer, nn.Linear) and a.ndim == 2:
        part = _outer(delta, a)
        of_bias = delta
    elif isinstance(layer, nn.Conv2d):
        delta = delta.permute(0, 2, 3, 1)  # [n, rows, columns, out]
        out, channels, height, width = weight.shape
        kernels = _at_every_pixel(layer, a, delta).reshape(n, -1)
        part = _rows(kernels, lambda total: total.view(out, height, width, channels).permute(0, 3, 1, 2))
        of_bias = delta.sum((1, 2))
    else:  # a linear layer over a sequence: positions are treated like pixels
        delta = delta.reshape(n, -1, delta.shape[-1])
        positions = a.reshape(n, -1, a.shape[-1])
        part = _rows(torch.bmm(delta.transpose(1, 2), positions).reshape(n, -1))
        of_bias = delta.sum(1)
    return [(weight, part)] if bias is None else [(weight, part), (bias, _rows(of_bias))]


def _at_every_pixel(layer: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    """Gradients [n, out, k·k·channels] of a convolution kernel: input patch times δ, summed over pixels.

    The patches overlap, and copying all of them is most of the work. With one channel, the shifted image for each
    kernel position is copied. With several channels, only horizontal neighbours are copied, and one matrix product
    per kernel row is computed.
    """
    assert not isinstance(layer.padding, str)
    n, height, width, out = delta.shape
    (above, beside), (down, right), (row_dilation, column_dilation) = layer.padding, layer.stride, layer.dilation
    seen = pad(a, (beside, beside, above, above)).permute(0, 2, 3, 1)  # channels last, as in memory
    rows = [slice(r, r + height * down, down) for r in range(0, layer.kernel_size[0] * row_dilation, row_dilation)]
    columns = [
        slice(c, c + width * right, right) for c in range(0, layer.kernel_size[1] * column_dilation, column_dilation)
    ]
    if layer.in_channels == 1:
        images = torch.stack([seen[:, r, c, 0] for r in rows for c in columns], dim=1)
        return torch.bmm(images.flatten(2), delta.reshape(n, -1, out)).transpose(1, 2)
    width_spanned = columns[-1].start + 1
    row_patches = seen.unfold(2, width_spanned, right)[..., ::column_dilation].transpose(3, 4)
    strips = row_patches.reshape(n, seen.shape[1], width, -1)  # [n, rows, columns, k·channels]
    delta = delta.reshape(n, -1, out).transpose(1, 2)
    by_row = [torch.bmm(delta, strips[:, r].reshape(n, height * width, -1)) for r in rows]
    return torch.stack(by_row, dim=2).flatten(2)


def has_own_parameters(layer: nn.Module) -> bool:
    """Whether the layer itself has parameters that are trained."""
    return any(p.requires_grad for p in layer.parameters(recurse=False))


# vmapped


def _by_vmap(network: Network, x: Tensor, inputs: Inputs, targets: Tensor) -> list[PerRecord]:
    """Gradients of any module that torch.func can trace: one full gradient per record."""
    module = network.replica().load(x)
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    state = {name: b.detach().clone() for name, b in module.named_buffers()}

    def loss(parameters: dict[str, Tensor], record: tuple[Tensor, ...], target: Tensor) -> Tensor:
        outputs = _call_with(module, {**parameters, **state}, inputs, record)
        return network.task.losses(outputs, target[None])[0]

    with VMAP_LOCK:
        rows = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, tensors_of(inputs), targets)
    return [_rows(rows[name].reshape(len(targets), -1)) for name in parameters]


def _call_with(module: nn.Module, state: dict[str, Tensor], like: Inputs, record: tuple[Tensor, ...]) -> Tensor:
    """Outputs [1, ...] of one record, given as one tensor per field of `like`."""
    rows = [tensor[None] for tensor in record]
    if isinstance(like, Fields) and like.names is not None:
        return main_output(functional_call(module, state, (), dict(zip(like.names, rows, strict=True))))
    return main_output(functional_call(module, state, tuple(rows)))


def _outputs_by_vmap(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    module = network.replica().load(x)
    state = {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}
    with torch.no_grad(), VMAP_LOCK:
        return vmap(lambda record: _call_with(module, state, inputs, record)[0])(tensors_of(inputs))


# records


def _by_records(network: Network, x: Tensor, inputs: Inputs, targets: Tensor) -> list[PerRecord]:
    """Gradients of any module: one backward pass per record."""
    replica = network.replica()
    rows = []
    for n in range(len(targets)):
        loss = network.losses(replica.load(x), inputs[n : n + 1], targets[n : n + 1]).sum()
        by_parameter = torch.autograd.grad(loss, replica.parameters, materialize_grads=True)  # 0 if unused
        rows.append(torch.cat([p.reshape(-1) for p in by_parameter]))
    return [_rows(torch.stack(rows))]


def _outputs_by_records(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    return torch.cat([network.outputs(x, record) for record in split(inputs, 1)])


def _outputs_of_batch(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    """Outputs with gradients enabled, as in training, because every record is then rounded alike."""
    module = network.replica().load(x)
    blocks = (map_inputs(lambda t: pad_records(t, ONE_SHAPE), block) for block in split(inputs, ONE_SHAPE))
    with torch.enable_grad():
        return torch.cat([main_output(call(module, block)).detach() for block in blocks])[: len(inputs)]


LAYERS = Kernel("layers", 256, PAD, _by_layers, _outputs_of_batch)
VMAPPED = Kernel("vmapped", 64, PAD, _by_vmap, _outputs_by_vmap)
RECORDS = Kernel("records", 16, 1, _by_records, _outputs_by_records)
