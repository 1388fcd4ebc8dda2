"""One forward and backward pass in which every layer's input and the loss's derivative at its output are recorded.

Layers with a formula (`layers`) are run by functions of this package on the whole batch: they compute what the layer
computes, with parameters out of the graph, and record their use on the tape. All other code of a module is run by torch
itself: for vetted modules on the batch, and for any other module under vmap, so that it sees one record at a time.

Parameters without a formula (used outside a layer, or of a layer of unknown type) are given a copy per record, so that
autograd computes their gradients per record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vmap

from pdsl.gradients.formulas import Gradient, PerRecord, Rows, combine
from pdsl.models.network import Network, Replica, main_output
from pdsl.tasks import VMAP_LOCK
from pdsl.utils.inputs import Fields, Inputs, call, tensors_of

Run = Callable[..., Tensor | tuple[Tensor, ...]]  # tensors [n, ...] → tensors [n, ...]
Formula = Callable[[Tensor], list[tuple[Tensor, Gradient]]]  # δ [n, ...] → gradients by parameter


class UnsuitableError(RuntimeError):
    """The tape does not have the whole gradient of these parameters."""

    def __init__(self, parameters: Sequence[Tensor], reason: str):
        super().__init__(reason)
        self.parameters = list(parameters)


class _Enter(torch.autograd.Function):
    """Inside vmap: run a function on the tensors of all records [n, ...]. The function must treat records alone."""

    @staticmethod
    def forward(run: Run, token: Tensor, *tensors: Tensor | None) -> Tensor:
        raise AssertionError("only called inside vmap")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        raise AssertionError("only called inside vmap")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], run: Run, token: Tensor, *tensors: Tensor | None
    ) -> tuple[object, object]:
        n = info.batch_size
        physical = [
            None if t is None else t.expand(n, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(tensors, in_dims[2:], strict=True)
        ]
        out = run(*physical)
        return out, 0 if isinstance(out, Tensor) else tuple(0 for _ in out)


class _Mark(torch.autograd.Function):
    """Identity that marks the place in the graph of a layer's output. `leaf` makes it part of the graph."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaf: Tensor) -> Tensor:
        # the same memory, but not a view: code after the layer may change it in place. No layer's backward needs it.
        return out.data

    @staticmethod
    def backward(ctx: Any, *delta: Tensor) -> tuple[Tensor | None, None]:
        return delta[0] if ctx.needs_input_grad[0] else None, None


@dataclass(frozen=True)
class _Use:
    edge: GradientEdge
    shape: torch.Size  # of the output
    inputs: list[tuple[Tensor, int]]  # and their versions
    parameters: list[Tensor]
    formula: Formula


@dataclass
class Tape:
    """Record of the layers' uses in one forward pass of a replica's module on n records."""

    replica: Replica
    one_record_at_a_time: bool
    uses: list[_Use] = field(default_factory=list)
    token: Tensor | None = None  # inside vmap: a tensor of the record
    leaf: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def enter(self, run: Run, *tensors: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """Run a function of this package on the tensors of all records [n, ...]."""
        if self.token is None:
            return run(*tensors)
        return _Enter.apply(run, self.token, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def record(
        self, out: Tensor, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None], formula: Formula
    ) -> Tensor:
        """Record a layer's use; returns the output through which the loss's derivative will be computed."""
        trained = [p for p in parameters if p is not None and p.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return out
        if self.one_record_at_a_time:
            out = _Mark.apply(out, self.leaf)  # type: ignore[no-untyped-call]
        elif not out.requires_grad:  # vetted layers change nothing in place, so the output marks its own place
            out.requires_grad_()
        versions = [(t, t._version) for t in inputs]
        self.uses.append(_Use(get_gradient_edge(out), out.shape, versions, trained, formula))
        return out

    def forward(self, network: Network, inputs: Inputs, copies: dict[str, Tensor]) -> Tensor:
        """Outputs [n, ...]; `copies` are the parameters with a copy per record [n, ...]."""
        module = self.replica.module
        if not self.one_record_at_a_time:
            return network.forward(module, inputs)

        def one(token: Tensor, record: tuple[Tensor, ...], own: dict[str, Tensor]) -> Tensor:
            self.token = token
            rows = [tensor[None] for tensor in record]
            args = Fields(rows, inputs.names) if isinstance(inputs, Fields) else rows[0]
            if not own:
                return main_output(call(module, args))[0]
            if isinstance(args, Fields) and args.names is not None:
                return main_output(functional_call(module, own, (), dict(zip(args.names, rows, strict=True))))[0]
            return main_output(functional_call(module, own, tuple(rows)))[0]

        tensors = tensors_of(inputs)
        try:
            with VMAP_LOCK:
                return vmap(one)(torch.zeros(len(tensors[0]), device=tensors[0].device), tensors, copies)
        finally:
            self.token = None

    def gradients(self, losses: Tensor, copies: dict[str, Tensor]) -> list[PerRecord]:
        """Per-record gradients by trained parameter, from each record's loss [n]."""
        n, parameters = len(losses), self.replica.parameters
        edges = [use.edge for use in self.uses]
        wanted = cast(Sequence[Tensor], [*edges, *copies.values(), *parameters])
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        deltas, rows, outside = _cut(found, len(edges), len(copies))
        missed = [p for p, g in zip(parameters, outside, strict=True) if g is not None]
        if missed:
            raise UnsuitableError(missed, "a layer's parameter is used outside the layer")
        changed = [p for use in self.uses if any(t._version != v for t, v in use.inputs) for p in use.parameters]
        if changed:
            raise UnsuitableError(changed, "a layer's input was changed in place")
        by_parameter: dict[int, list[Gradient]] = {id(p): [] for p in parameters}
        for use, delta in zip(self.uses, deltas, strict=True):
            if delta is not None:
                for parameter, gradient in use.formula(delta):
                    if id(parameter) in by_parameter:
                        by_parameter[id(parameter)].append(gradient)
        named = dict(self.replica.module.named_parameters())
        for name, g in zip(copies, rows, strict=True):
            if g is not None:
                by_parameter[id(named[name])].append(Rows(g.reshape(n, -1)))
        return [combine(by_parameter[id(p)], n, p.numel(), losses.device) for p in parameters]


def _cut(found: Sequence[Tensor | None], *sizes: int) -> list[Sequence[Tensor | None]]:
    parts = []
    for size in sizes:
        parts.append(found[:size])
        found = found[size:]
    return [*parts, found]
