"""Modules that are proven to treat every record independently: vetted layers, one after another.

The layers of the tables below work record by record, and `nn.Sequential` runs one after another. No other Python code
has a say in such a module, so no branch, counter or attribute can make records mix. A module with code of its own is
not refused: it is given one record at a time (`per_example`).
"""

from torch import nn

from pdsl import models

POINTWISE: set[type[nn.Module]] = {
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.LogSigmoid, nn.Threshold,
    nn.Dropout, nn.Dropout2d, models.Tanh,
}  # fmt: skip
OF_ONE_RECORD: set[type[nn.Module]] = {
    nn.Linear, models.AlignedLinear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    nn.ZeroPad2d, models.MaxPool, models.RMSNorm, models.Centred, models.Flatten,
}  # fmt: skip


def is_vetted(module: nn.Module) -> bool:
    """Whether every module in it is of a vetted type, without hooks and with the type's own forward."""
    return all(_is_vetted(m) for m in module.modules())


def _is_vetted(m: nn.Module) -> bool:
    hooked = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    if hooked or "forward" in vars(m):
        return False
    if type(m) is nn.Flatten:
        return m.start_dim >= 1
    return type(m) in POINTWISE | OF_ONE_RECORD | {nn.Sequential}
