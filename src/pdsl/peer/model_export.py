"""A user's model as data for a plan: a description of its layers, and a file with its weights."""

import hashlib
from typing import Any, NamedTuple

from torch import nn

from pdsl.models.architecture import build, describe, parse
from pdsl.models.weights import pack_weights
from pdsl.models.zoo import create_module
from pdsl.utils.imports import import_object


class ExportedModel(NamedTuple):
    """Settings of the section `model` of a plan, and the content of the file of weights that they need."""

    settings: dict[str, Any]
    weights: bytes


def export_model(module: nn.Module) -> ExportedModel:
    """Export a torch.nn.Sequential; PdslError if a layer cannot be described.

    All members start from its weights. Layers with requires_grad=False stay frozen.
    """
    layers = describe(module)
    same = build(parse(layers))
    same.load_state_dict(dict(zip(same.state_dict(), module.state_dict().values(), strict=True)))
    content = pack_weights(same)
    return ExportedModel({"layers": layers, "weights_sha256": hashlib.sha256(content).hexdigest()}, content)


def import_model(path: str) -> nn.Module:
    """The module at `package.module:name`, or that this function or class of the plan's author creates."""
    found = import_object(path, "--model")
    return found if isinstance(found, nn.Module) else create_module(path, found, "--model")
