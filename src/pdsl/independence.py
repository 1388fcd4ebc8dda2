"""Is a record's gradient its own? The choice of a kernel, and the refusal of models through which records mix.

Proven: a network made of vetted layers (`vetting`: every one of them works record by record), and any module under
`vmapped` or `records`, which give the module one record at a time. Tested, on public records with outliers,
duplicates and other companions, for several parameter vectors: that the kernel gives each record the gradient it has
alone, the same bits in any company, and that the module neither keeps state between calls nor draws random numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pdsl import models
from pdsl.errors import PdslError
from pdsl.models import Network
from pdsl.per_example import LAYERS, PAD, RECORDS, VMAPPED, Kernel, has_own_parameters
from pdsl.vetting import is_vetted

TRIAL = 48  # records of the trial batch, a multiple of PAD, with so many
OUTLIERS, DUPLICATES = 6, 2
ENOUGH = 0.9  # share of the trial's records whose gradients must agree: an outlier's may turn on a rounding error


def choose_kernel(network: Network, inputs: Tensor, targets: Tensor) -> Kernel:
    """The fastest kernel that is right for this module; PdslError if records mix in it, or it keeps state.

    `inputs` and `targets` are public records. A module may call a layer twice, share a weight, or use a parameter
    outside a layer: then derivatives by layer are not the whole gradient. Another may hold code that torch.func cannot
    trace.
    """
    records, labels = _trial_batch(inputs, targets)
    models_ = [network.elsewhere(), network.start() + 0.3 * _wave(network, 2.0), 20 * _wave(network, 3.0)]
    alone = [_alone(network, x, records, labels) for x in models_[:2]]  # a wild model makes much of rounding
    _check_state(network, models_, records, labels, alone)
    _check_mixing(network, models_, records)
    candidates = (LAYERS, VMAPPED) if is_vetted(network.module) and _has_plain_layers(network) else (VMAPPED,)
    for kernel in (kernel for candidate in candidates for kernel in (candidate, candidate.with_one_shape)):
        try:
            right = all(_is_right(kernel, network, *at, records, labels) for at in zip(models_, alone, strict=False))
            if right and all(_is_steady(kernel, network, x, records, labels) for x in models_):
                return kernel
        except Exception:  # a user's module that cannot be hooked or traced may fail in any way
            continue
    return RECORDS


def _has_plain_layers(network: Network) -> bool:
    """Every parameter is a linear layer's or an ordinary convolution's, and belongs to one layer only."""
    layers = [m for m in network.module.modules() if has_own_parameters(m)]
    owned = sum(p.numel() for m in layers for p in m.parameters(recurse=False))
    return owned == network.d and all(type(m) is nn.Linear or (type(m) is nn.Conv2d and _is_plain(m)) for m in layers)


def _is_plain(m: nn.Conv2d) -> bool:
    zeros_around = m.padding_mode == "zeros" and not isinstance(m.padding, str)
    return zeros_around and m.groups == 1


def _trial_batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Public records, outliers made of them, and duplicates: [TRIAL, ...]."""
    places = torch.arange(TRIAL - OUTLIERS - DUPLICATES, device=inputs.device) % len(inputs)
    some, one = inputs[places], inputs[places[:1]]
    outliers = [1e3 * one, -1e3 * one, 1e-3 * one, torch.zeros_like(one), torch.full_like(one, 1e6), 1e18 * one]
    records = torch.cat([some, *outliers, some[:DUPLICATES]])
    labels = torch.cat([targets[places], targets[places[:OUTLIERS]], targets[places[:DUPLICATES]]])
    return models.channels_last(records), labels


def _wave(network: Network, frequency: float) -> Tensor:
    x = network.start()
    return (frequency * torch.arange(network.d, device=x.device)).sin()


def _alone(network: Network, x: Tensor, records: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each record alone: [n, d]."""
    part = RECORDS.gradients(network, x, records, labels)
    return _each(part.weighted_sum, len(records), records.device)


def _each(weighted_sum: Callable[[Tensor], Tensor], n: int, device: torch.device) -> Tensor:
    """The n gradients of which there are weighted sums: [n, d]."""
    return torch.stack([weighted_sum(row) for row in torch.eye(n, dtype=torch.float64, device=device)])


def _check_state(network: Network, points: list[Tensor], records: Tensor, labels: Tensor, alone: list[Tensor]) -> None:
    """PdslError if the same record has another gradient the second time, or the module is not as it was."""
    again = _alone(network, points[0], records.flip(0), labels.flip(0)).flip(0)
    network.check_state()
    if not torch.equal(again.nan_to_num(), alone[0].nan_to_num()):
        raise PdslError(
            "the model gives the same record another gradient the second time: it keeps state or draws random numbers"
            " in forward; take that out of forward"
        )


def _check_mixing(network: Network, points: list[Tensor], records: Tensor) -> None:
    """PdslError if a record's output in a batch is not its output alone. Outliers are there to disturb the others."""
    ordinary = torch.cat([torch.arange(TRIAL - OUTLIERS - DUPLICATES), torch.arange(TRIAL - DUPLICATES, TRIAL)])
    for x in points:
        together = network.logits(x, records)[ordinary]
        apart = torch.cat([network.logits(x, record) for record in torch.split(records[ordinary], 1)])
        finite = apart.isfinite().all(1)
        scale = apart[finite].abs().amax(1, keepdim=True).clamp(min=1e-6)
        if not bool(((together[finite] - apart[finite]).abs() <= 1e-3 * scale).all()):
            raise PdslError(
                "the model mixes records: its output for a record depends on the other records of the batch, so one"
                " record's gradient is not its own and cannot be kept private; use GroupNorm or LayerNorm, which look"
                " at one record at a time"
            )


def _is_right(kernel: Kernel, network: Network, x: Tensor, alone: Tensor, records: Tensor, labels: Tensor) -> bool:
    """Whether the kernel gives every record the gradient it has alone, but for rounding."""
    together = _each(kernel.gradients(network, x, records, labels).weighted_sum, len(records), records.device)
    finite = alone.isfinite().all(1)
    return _agree(network, together[finite], alone[finite])


def _is_steady(kernel: Kernel, network: Network, x: Tensor, records: Tensor, labels: Tensor) -> bool:
    """Whether a record's gradient is the same bits in any company, at any place and in a batch of any size."""
    n, device = len(records), records.device
    together = _each(kernel.gradients(network, x, records, labels).weighted_sum, n, device)
    for part in (torch.arange(n - 1, -1, -1), torch.arange(1, n), torch.arange(PAD + 3), torch.arange(1)):
        other = kernel.gradients(network, x, records[part], labels[part])
        if not torch.equal(_each(other.weighted_sum, len(part), device).nan_to_num(), together[part].nan_to_num()):
            return False
    return True


def _agree(network: Network, found: Tensor, right: Tensor) -> bool:
    """Equal but for rounding, for nearly every record and in each parameter: the largest must not hide the others."""
    sizes = [shape.numel() for _, shape in network.shapes()]
    rounding = 1e-5 * right.norm(dim=1)
    alike = [
        (f - r).norm(dim=1) <= 1e-3 * r.norm(dim=1) + rounding
        for f, r in zip(torch.split(found, sizes, dim=1), torch.split(right, sizes, dim=1), strict=True)
    ]
    return float(torch.stack(alike).all(0).double().mean()) >= ENOUGH
