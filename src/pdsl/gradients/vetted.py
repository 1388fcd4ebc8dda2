"""Vetted layers: layers that treat every record of a batch independently, by their documented definition."""

from torch import nn
from torch.nn.functional import gelu, relu

from pdsl.models.network import is_frozen
from pdsl.models.residual import Residual
from pdsl.models.zoo import AlignedLinear, Centred, Flatten, MaxPool, RMSNorm, Tanh

# Together with nn.Sequential and Residual these layers contain no other Python code, so no branch, counter or
# attribute can make records mix. Modules with other code are given one record at a time.
POINTWISE: set[type[nn.Module]] = {
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Threshold,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, Tanh,
}  # fmt: skip
PER_RECORD: set[type[nn.Module]] = {
    nn.Linear, AlignedLinear, nn.modules.linear.NonDynamicallyQuantizableLinear, nn.Embedding,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d, nn.ZeroPad2d, MaxPool, RMSNorm, Centred, Flatten,
}  # fmt: skip
FROZEN_ONLY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # with stored statistics
CONTAINERS: set[type[nn.Module]] = {nn.Sequential, nn.ModuleList, nn.TransformerEncoder, Residual}


def is_vetted(module: nn.Module) -> bool:
    """Whether all its modules are of vetted types, without hooks and without a replaced forward."""
    return all(_is_vetted(m) for m in module.modules())


def _is_vetted(m: nn.Module) -> bool:
    hooked = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    if hooked or "forward" in vars(m):
        return False
    if isinstance(m, FROZEN_ONLY) and type(m) in FROZEN_ONLY:
        return is_frozen(m) and not m.training
    if type(m) is nn.Flatten:
        return m.start_dim >= 1
    if type(m) is nn.MultiheadAttention:
        return bool(m.batch_first)
    if type(m) is nn.TransformerEncoderLayer:
        return any(m.activation is known for known in (relu, gelu))
    return type(m) in POINTWISE | PER_RECORD | CONTAINERS
