"""Plan of a pass: which layers of a replica are run by their formulas, and which parameters get a copy per record."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from pdsl.gradients.chain import Chain, chain_of
from pdsl.gradients.layers import Forward, forward_of, pool_first
from pdsl.gradients.tape import Tape
from pdsl.gradients.vetted import is_vetted
from pdsl.models.network import Replica


@dataclass(frozen=True)
class Plan:
    """Made once per replica, and again if more parameters turn out to need copies."""

    tape: Tape
    forwards: list[tuple[nn.Module, Forward]]
    copied: dict[str, nn.Parameter]  # parameters without a formula, by name
    chain: Chain | None = None  # the module as a chain of layers, which needs no tape

    @contextmanager
    def with_formulas(self) -> Iterator[Tape]:
        """Run layers by their formulas."""
        self.tape.uses.clear()
        for layer, forward in self.forwards:
            vars(layer)["forward"] = forward
        try:
            yield self.tape
        finally:
            for layer, _ in self.forwards:
                del vars(layer)["forward"]
            self.tape.uses.clear()

    def copies(self, n: int) -> dict[str, Tensor]:
        """Copies of parameters for n records, without using memory."""
        return {name: p.detach().expand(n, *p.shape).requires_grad_() for name, p in self.copied.items()}


def plan_of(replica: Replica, one_record_at_a_time: bool) -> Plan:
    """Plan of this replica; RuntimeError if not one record at a time, and a layer is not vetted or has no formula."""
    key = (one_record_at_a_time, frozenset(replica.copied))
    if key not in replica.plans:
        replica.plans[key] = _make(replica, one_record_at_a_time)
    plan = replica.plans[key]
    assert isinstance(plan, Plan)
    return plan


def _make(replica: Replica, one_record_at_a_time: bool) -> Plan:
    tape, module = Tape(replica, one_record_at_a_time), replica.module
    copied = _copied(tape, replica)
    if not one_record_at_a_time and not is_vetted(module):
        raise RuntimeError("the module has code of its own")
    if not one_record_at_a_time and copied:
        raise RuntimeError("a parameter has no formula")
    ids = {id(p) for p in copied.values()}
    forwards = [
        (layer, forward)
        for layer in module.modules()
        if not any(id(p) in ids for p in layer.parameters())
        for forward in [forward_of(tape, layer)]
        if forward is not None
    ]
    if not one_record_at_a_time:
        sequences = [layer for layer in module.modules() if type(layer) is nn.Sequential]
        forwards += [(layer, pool_first(layer)) for layer in sequences]
    return Plan(tape, forwards, copied, None if one_record_at_a_time else chain_of(replica))


def _copied(tape: Tape, replica: Replica) -> dict[str, nn.Parameter]:
    """Trained parameters without a formula, and all parameters of layers that have such a parameter."""
    named = [(name, p) for name, p in replica.module.named_parameters() if p.requires_grad]
    found = {id(p) for name, p in named if name in replica.copied}
    while True:
        before = len(found)
        for layer in replica.module.modules():
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if any(id(p) in found for p in own) or forward_of(tape, layer) is None:
                found |= {id(p) for p in own}
        if len(found) == before:
            return {name: p for name, p in named if id(p) in found}
