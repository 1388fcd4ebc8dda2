"""The choice of a gradient kernel, and the refusal of models that mix records.

Clipping bounds the effect of a record only if no other record's gradient depends on it.

Proven by construction: networks of vetted layers, because each of these layers works record by record; and any module
under the kernels `vmapped` and `records`, because they pass it one record at a time.

Tested on public records with outliers and duplicates, for several parameter vectors: the kernel gives each record the
gradient it has alone, with the same bits in any batch; the module keeps no state between calls and draws no random
numbers.
"""

import re
from dataclasses import replace
from functools import partial
from traceback import walk_tb

import torch
from torch import Tensor, nn

from pdsl.gradients.per_example import LAYERS, PAD, RECORDS, VMAPPED, Kernel
from pdsl.gradients.plan import plan_of
from pdsl.gradients.vetted import is_vetted
from pdsl.models.network import Network
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, channels_last, concat, map_inputs, split

TRIAL = 48  # records in the trial batch, a multiple of PAD
OUTLIERS, DUPLICATES = 6, 2  # records among them
MIN_SLOW = 4096  # numbers in parameters without a formula, from which on a note is given
MAX_NAMED = 5  # parameters named in a note
MIN_AGREEING = 0.9  # share of the trial's records whose gradients must agree: rounding may decide an outlier's


def choose_kernel(network: Network, inputs: Inputs, targets: Tensor) -> Kernel:
    """Choose the fastest kernel that is correct for this module; PdslError if the module mixes records or keeps state.

    `inputs` and `targets` are public records. The kernel `layers` misses part of the gradient if a module calls a
    layer twice, shares a weight, or uses a parameter outside a layer. The kernel `vmapped` fails on code that
    torch.func cannot trace.
    """
    records, labels = _trial_batch(inputs, targets)
    models = [
        network.perturbed_parameters(),
        network.initial_parameters() + 0.3 * _wave(network, 2.0),
        20 * _wave(network, 3.0),
    ]
    alone = [_alone(network, x, records, labels) for x in models[:2]]  # the third model amplifies rounding errors
    _check_state(network, models, records, labels, alone)
    _check_mixing(network, models, records)
    candidates = (LAYERS, VMAPPED) if is_vetted(network.module) else (VMAPPED,)
    failures = []
    for candidate, kernel in ((c, kernel) for c in candidates for kernel in (c, c.with_one_shape)):
        try:
            right = all(_is_right(kernel, network, *at, records, labels) for at in zip(models, alone, strict=False))
            if right and all(_is_deterministic(kernel, network, x, records, labels) for x in models):
                return replace(kernel, note=_note(network)) if candidate is VMAPPED else kernel
        except Exception as e:  # a module that cannot be traced may raise any exception
            failures.append(_explain(e))
    reason = failures[-1] if failures else "the model's rounding depends on the batch"
    return replace(RECORDS, note=f"per-record gradients are computed one record at a time, which is slow: {reason}")


def _explain(error: Exception) -> str:
    """Module whose code cannot be traced, the reason without torch's advice to its developers, and a remedy."""
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [type(owner).__name__ for owner in owners if isinstance(owner, nn.Module)]
    name, text = modules[-1] if modules else "the model", next(iter(str(error).splitlines()), type(error).__name__)
    if "data-dependent" in text or ".item()" in text:
        return (
            f"the code of {name} depends on the values of a tensor, like `if x.max() > 1`; use torch.where instead, and"
            " leave out the mask if all inputs have one length"
        )
    if (operation := re.search(r"aten::\w+", text)) is not None:
        return f"torch.vmap has no rule for {operation[0]} in {name}; use another operation there"
    return f"the code of {name} cannot be traced by torch.func ({text})"


def _note(network: Network) -> str:
    """Parameters whose gradients are built for every record; empty if that takes little time."""
    copied = plan_of(network.replica(), one_record_at_a_time=True).copied
    if sum(p.numel() for p in copied.values()) < MIN_SLOW:
        return ""
    names = list(copied)
    shown = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    ids = {id(p) for p in copied.values()}
    layers = [m for m in network.replica().module.modules() if any(id(p) in ids for p in m.parameters(recurse=False))]
    kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers))
    return (
        f"per-record gradients of {shown} are built for every record, which is slow: no formula for {kinds}; use"
        " standard layers, like nn.Linear, nn.Conv2d, nn.Embedding and nn.GRU, and use their weights only through them"
    )


def _trial_batch(inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
    """Public records, outliers derived from them, and duplicates: [TRIAL, ...]. Integers have no outliers."""
    places = torch.arange(TRIAL - OUTLIERS - DUPLICATES, device=targets.device) % len(targets)
    some, one = inputs[places], inputs[places[:1]]
    outliers = [map_inputs(partial(_outlier, factor), one) for factor in (1e3, -1e3, 1e-3, 0.0, 1e6, 1e18)]
    records = concat([some, *outliers, some[:DUPLICATES]])
    labels = torch.cat([targets[places], targets[places[:OUTLIERS]], targets[places[:DUPLICATES]]])
    return channels_last(records), labels


def _outlier(factor: float, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.full_like(tensor, factor) if factor == 1e6 else factor * tensor


def _wave(network: Network, frequency: float) -> Tensor:
    x = network.initial_parameters()
    return (frequency * torch.arange(network.num_parameters, device=x.device)).sin()


def _alone(network: Network, x: Tensor, records: Inputs, labels: Tensor) -> Tensor:
    """Gradient of each record, computed alone: [n, d]."""
    one = torch.ones(1, dtype=torch.float64, device=labels.device)
    singles = map(RECORDS.pad_block, split(records, 1), torch.split(labels, 1))
    return torch.stack([RECORDS.gradients(network, x, single).weighted_sum(one) for single in singles])


def _rows(kernel: Kernel, network: Network, x: Tensor, records: Inputs, labels: Tensor) -> Tensor:
    """Gradient of each record by this kernel: [n, d]."""
    gradients = kernel.gradients(network, x, kernel.pad_block(records, labels))
    unit_weights = torch.eye(len(records), dtype=torch.float64, device=labels.device)
    return torch.stack([gradients.weighted_sum(row) for row in unit_weights])


def _check_state(network: Network, points: list[Tensor], records: Inputs, labels: Tensor, alone: list[Tensor]) -> None:
    """Raise PdslError if a record's gradient differs the second time, or the module has changed."""
    back = torch.arange(len(labels) - 1, -1, -1)
    again = _alone(network, points[0], records[back], labels[back]).flip(0)
    network.check_state()
    if not torch.equal(again.nan_to_num(), alone[0].nan_to_num()):
        raise PdslError(
            "the model gives the same record another gradient the second time: it keeps state or draws random numbers"
            " in forward; remove that from forward"
        )


def _check_mixing(network: Network, points: list[Tensor], records: Inputs) -> None:
    """Raise PdslError if a record's output in a batch with outliers differs from its output alone."""
    ordinary = torch.cat([torch.arange(TRIAL - OUTLIERS - DUPLICATES), torch.arange(TRIAL - DUPLICATES, TRIAL)])
    for x in points:
        together = network.outputs(x, records)[ordinary].reshape(len(ordinary), -1)
        apart = torch.cat([network.outputs(x, record) for record in split(records[ordinary], 1)]).reshape(
            together.shape
        )
        finite = apart.isfinite().all(1)
        scale = apart[finite].abs().amax(1, keepdim=True).clamp(min=1e-6)
        if not bool(((together[finite] - apart[finite]).abs() <= 1e-3 * scale).all()):
            raise PdslError(
                "the model mixes records: its output for a record depends on the other records of the batch, so"
                " clipping does not bound the effect of one record; use GroupNorm or LayerNorm, which normalise each"
                " record alone (pdsl.make_private(model) replaces BatchNorm), and batch_first=True in recurrent and"
                " transformer layers"
            )


def _is_right(kernel: Kernel, network: Network, x: Tensor, alone: Tensor, records: Inputs, labels: Tensor) -> bool:
    """Whether the kernel gives every record the gradient it has alone, up to rounding."""
    together = _rows(kernel, network, x, records, labels)
    finite = alone.isfinite().all(1)
    return _agree(network, together[finite], alone[finite])


def _is_deterministic(kernel: Kernel, network: Network, x: Tensor, records: Inputs, labels: Tensor) -> bool:
    """Whether a record's gradient has the same bits with any other records, at any position, in any batch size."""
    n, together = len(records), _rows(kernel, network, x, records, labels)
    for part in (torch.arange(n - 1, -1, -1), torch.arange(1, n), torch.arange(PAD + 3), torch.arange(1)):
        other = _rows(kernel, network, x, records[part], labels[part])
        if not torch.equal(other.nan_to_num(), together[part].nan_to_num()):
            return False
    return True


def _agree(network: Network, found: Tensor, right: Tensor) -> bool:
    """Equal up to rounding for MIN_AGREEING of the records, in each parameter separately."""
    sizes = [shape.numel() for _, shape in network.shapes()]
    rounding = 1e-5 * right.norm(dim=1)
    agrees = [
        (f - r).norm(dim=1) <= 1e-3 * r.norm(dim=1) + rounding
        for f, r in zip(torch.split(found, sizes, dim=1), torch.split(right, sizes, dim=1), strict=True)
    ]
    return float(torch.stack(agrees).all(0).double().mean()) >= MIN_AGREEING
