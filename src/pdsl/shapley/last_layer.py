"""The last linear layer of a model: its inputs, and its part of a vector of all parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdsl.models.network import Network, run_in_blocks, trainable
from pdsl.utils.inputs import Inputs

Call = tuple[nn.Linear, Tensor, Tensor]  # a layer, its input and its output


@dataclass(frozen=True)
class LastLayer:
    """A trained linear layer whose output is the model's."""

    network: Network
    name: str
    weight: tuple[int, int]  # first and last place among all parameters
    bias: tuple[int, int] | None
    outputs: int
    whole: bool  # whether the model has no other trained parameters

    def part(self, vectors: Tensor) -> Tensor:
        """The layer's part of vectors [k, d]: [k, outputs, f], with the bias as the last column."""
        weight = vectors[:, slice(*self.weight)].reshape(len(vectors), self.outputs, -1)
        if self.bias is None:
            return weight
        return torch.cat([weight, vectors[:, slice(*self.bias), None]], dim=2)

    def features(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Inputs [n, f] of the layer at the model x [d], with a column of ones if it has a bias."""
        module = self.network.replica().load(x)
        calls, _ = _record_calls(module, inputs)
        features = torch.cat([given for layer, given, _ in calls if layer is module.get_submodule(self.name)])
        if self.bias is None:
            return features
        return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def find_last_layer(network: Network, inputs: Inputs) -> LastLayer | None:
    """The last layer; None if the model's output is not that of a linear layer, or its weights have another use."""
    module = network.replica().load(network.initial_parameters())
    calls, outputs = _record_calls(module, inputs)
    if not calls:
        return None
    last = calls[-1][0]
    made = torch.cat([out for layer, _, out in calls if layer is last])
    if made.ndim != 2 or made.shape != outputs.shape or not torch.equal(made, outputs):
        return None
    uses = [p for _, p in module.named_parameters(remove_duplicate=False)]
    own = list(last.parameters())
    if not all(p.requires_grad for p in own) or any(sum(p is use for use in uses) != 1 for p in own):
        return None
    places, end = {}, 0
    for p in trainable(module):
        places[id(p)] = (end, end := end + p.numel())
    name = next(name for name, layer in module.named_modules() if layer is last)
    bias = None if last.bias is None else places[id(last.bias)]
    return LastLayer(network, name, places[id(last.weight)], bias, len(last.weight), len(own) == len(places))


def _record_calls(module: nn.Module, inputs: Inputs) -> tuple[list[Call], Tensor]:
    """Calls of all linear layers of a module, and its outputs."""
    calls: list[Call] = []
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    hooks = [
        layer.register_forward_hook(lambda *call: calls.append((call[0], call[1][0], call[2]))) for layer in layers
    ]
    with torch.no_grad():
        outputs = run_in_blocks(module, inputs)
    for hook in hooks:
        hook.remove()
    return calls, outputs
