"""Per-record gradient kernels: each record's squared gradient norm, and any weighted sum of the gradients.

A record's gradient has the same bits whatever the other records of its batch are: batches are padded to a few sizes,
or to one; `independence` tests this on public records; and sums over records are computed in float64.

| kernel    | for                                  | why records do not mix                              |
|-----------|--------------------------------------|-----------------------------------------------------|
| `layers`  | vetted layers that have formulas     | every layer works record by record                  |
| `vmapped` | any module that torch.func can trace | its code is given one record at a time, by vmap     |
| `records` | any module                           | one record at a time; a module with state is refused |

The kernels are listed from fast to general. The first two use the formulas of `layers` for each layer that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdsl.gradients.formulas import Block, PerRecord, Rows
from pdsl.gradients.plan import plan_of
from pdsl.gradients.tape import UnsuitableError
from pdsl.models.network import Network, main_output
from pdsl.utils.inputs import Inputs, call, map_inputs, split

__all__ = ["LAYERS", "RECORDS", "VMAPPED", "Block", "Kernel", "PerRecord"]

PAD = 16  # records; matrix products with a multiple of PAD rows usually round every row alike
ONE_SHAPE = 64  # records; the only block size for modules whose rounding depends on the size


@dataclass(frozen=True)
class Kernel:
    """A method to compute per-record gradients."""

    name: str
    block: int  # records per call; bounds memory
    pad: int  # records; blocks are padded with zeros to a multiple of this
    run: Callable[[Network, Tensor, Block], list[PerRecord]]  # (network, x [d], records)
    outputs: Callable[[Network, Tensor, Inputs], Tensor]  # (network, x [d], inputs), each record independently
    note: str = ""  # why the kernel is slow for this model, with the layers' names; empty if it is not

    @property
    def with_one_shape(self) -> "Kernel":
        """Copy with a single block size, for modules whose rounding depends on the size."""
        return replace(self, name=f"{self.name}, one shape", block=ONE_SHAPE, pad=ONE_SHAPE)

    def pad_block(self, inputs: Inputs, targets: Tensor) -> Block:
        """Records padded as the kernel requires."""
        padded = map_inputs(lambda tensor: pad_records(tensor, self.pad), inputs)
        return Block(padded, pad_records(targets, self.pad), len(inputs))

    def gradients(self, network: Network, x: Tensor, records: Block) -> PerRecord:
        """Gradients of a block of records with respect to all parameters x [d]."""
        n = records.n
        parts = self.run(network, x, records)
        if len(parts) == 1:
            return PerRecord(parts[0].squared_norms[:n], parts[0].weighted_sum)
        sizes = [shape.numel() for _, shape in network.shapes()]
        squared_norms = torch.stack([part.squared_norms for part in parts]).sum(0)

        def weighted_sum(factors: Tensor) -> Tensor:
            total, end = torch.empty(x.numel(), dtype=torch.float64, device=factors.device), 0
            for part, size in zip(parts, sizes, strict=True):
                start, end = end, end + size
                if part.write is not None:
                    part.write(factors, total[start:end])
                else:
                    total[start:end] = part.weighted_sum(factors)
            return total

        return PerRecord(squared_norms[:n], weighted_sum)


def pad_records(rows: Tensor, multiple: int) -> Tensor:
    """Pad with zero records to a multiple."""
    missing = -len(rows) % multiple
    if not missing:
        return rows
    layout = torch.channels_last if rows.ndim == 4 else torch.contiguous_format
    shape = (len(rows) + missing, *rows.shape[1:])
    padded = torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=layout)
    padded[: len(rows)] = rows
    padded[len(rows) :] = 0
    return padded


# layers and vmapped


def _by_layers(network: Network, x: Tensor, records: Block) -> list[PerRecord]:
    """Gradients of a network of vetted layers with formulas, in one backward pass; RuntimeError for other modules."""
    return _by_formulas(network, x, records, one_record_at_a_time=False)


def _by_vmap(network: Network, x: Tensor, records: Block) -> list[PerRecord]:
    """Gradients of any module that torch.func can trace.

    A parameter without a formula gets a copy per record. Parameters that turn out to be used outside their layers, or
    whose layer's input is changed in place, get one too, in this call and in all later ones.
    """
    replica = network.replica()
    while True:
        try:
            return _by_formulas(network, x, records, one_record_at_a_time=True)
        except UnsuitableError as e:
            ids = {id(p) for p in e.parameters}
            more = {name for name, p in replica.module.named_parameters() if id(p) in ids} - replica.copied
            if not more:
                raise
            replica.copied |= more


def _by_formulas(network: Network, x: Tensor, records: Block, one_record_at_a_time: bool) -> list[PerRecord]:
    replica = network.replica()
    plan = plan_of(replica, one_record_at_a_time)
    if plan.chain is not None:
        of_chain = plan.chain.gradients(network.task, replica.aligned(x), records)
        if of_chain is not None:
            return [of_chain]
    replica.load(x)
    copies = plan.copies(len(records.targets))
    with plan.with_formulas() as tape:
        losses = network.task.losses(tape.forward(network, records.inputs, copies), records.targets)
        return tape.gradients(losses, copies)


def _outputs_by_vmap(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    """Outputs as in training, because every record is then rounded alike."""
    replica = network.replica()
    replica.load(x)
    plan = plan_of(replica, one_record_at_a_time=True)
    blocks = (map_inputs(lambda t: pad_records(t, ONE_SHAPE), block) for block in split(inputs, ONE_SHAPE))
    with torch.enable_grad(), plan.with_formulas() as tape:
        copies = plan.copies(ONE_SHAPE)
        return torch.cat([tape.forward(network, block, copies).detach() for block in blocks])[: len(inputs)]


# records


def _by_records(network: Network, x: Tensor, records: Block) -> list[PerRecord]:
    """Gradients of any module: one backward pass per record."""
    replica, inputs, targets = network.replica(), records.inputs, records.targets
    rows = []
    for n in range(len(targets)):
        loss = network.losses(replica.load(x), inputs[n : n + 1], targets[n : n + 1]).sum()
        by_parameter = torch.autograd.grad(loss, replica.parameters, materialize_grads=True)  # 0 if unused
        rows.append(torch.cat([p.reshape(-1) for p in by_parameter]))
    return [_rows(torch.stack(rows))]


def _rows(g: Tensor) -> PerRecord:
    """Gradients given as rows [n, size]."""
    return Rows(g).per_record()


def _outputs_by_records(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    return torch.cat([network.outputs(x, record) for record in split(inputs, 1)])


def _outputs_of_batch(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    """Outputs with gradients enabled, as in training, because every record is then rounded alike."""
    module = network.replica().load(x)
    blocks = (map_inputs(lambda t: pad_records(t, ONE_SHAPE), block) for block in split(inputs, ONE_SHAPE))
    with torch.enable_grad():
        return torch.cat([main_output(call(module, block)).detach() for block in blocks])[: len(inputs)]


LAYERS = Kernel("layers", 256, PAD, _by_layers, _outputs_of_batch)
VMAPPED = Kernel("vmapped", 256, PAD, _by_vmap, _outputs_by_vmap)
RECORDS = Kernel("records", 16, 1, _by_records, _outputs_by_records)
