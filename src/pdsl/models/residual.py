"""Residual block: the only container besides torch.nn.Sequential that a model as data may have."""

from torch import Tensor, nn


class Residual(nn.Module):
    """x + body(x), or shortcut(x) + body(x) if the shapes differ; the body is a row of layers."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None):
        super().__init__()
        self.body = nn.Sequential(*layers)
        if isinstance(shortcut, nn.Sequential):
            self.shortcut = shortcut
        else:
            self.shortcut = nn.Sequential(*([] if shortcut is None else [shortcut]))

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.shortcut(x)
        body: Tensor = self.body(x)
        return kept + body
