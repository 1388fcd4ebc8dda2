"""Make a model private: replace layers in which the records of a batch affect each other."""

import copy
import warnings
from math import gcd

from torch import nn

MAX_GROUPS = 32  # of a GroupNorm that replaces a BatchNorm


def make_private(model: nn.Module) -> nn.Module:
    """Copy of a model in which every layer treats each record alone; a warning says what was changed.

    BatchNorm becomes GroupNorm with the same affine parameters. InstanceNorm loses its running statistics. A model
    without such layers is returned as a copy, unchanged.
    """
    private = copy.deepcopy(model)
    changed = []
    for name, layer in list(private.named_modules()):
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            norm = _group_norm(layer)
            private = _replace(private, name, norm)
            changed.append(f"{name or 'the model'}: {type(layer).__name__} → GroupNorm({norm.num_groups} groups)")
        elif isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            changed.append(f"{name or 'the model'}: {type(layer).__name__} without running statistics")
    if changed:
        warnings.warn(f"make_private changed {len(changed)} layer(s): {'; '.join(changed)}", stacklevel=2)
    else:
        warnings.warn("make_private changed nothing: no layer mixes records", stacklevel=2)
    return private


def _group_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    """GroupNorm for the layer's channels, with its affine parameters."""
    channels = layer.num_features
    norm = nn.GroupNorm(gcd(MAX_GROUPS, channels), channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm.train(layer.training)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """The model with another layer of this name; the layer itself if the name is empty."""
    if not name:
        return layer
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return model
