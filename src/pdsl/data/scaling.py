"""Scaling of inputs by public constants."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import AugmentedFields, Fields, Inputs
from pdsl.utils.types import JsonDict

ROUNDING = 1e-7  # relative: a smaller deviation is that of equal float32 numbers


@dataclass(frozen=True, eq=False)
class Scaling:
    """Constants of the scaled inputs (x / white - mean) / deviation, to be applied to raw inputs of the same form."""

    mean: Tensor  # of one record's shape, or broadcast to it: [features], or [channels, 1, 1]
    deviation: Tensor
    white: float = 1.0  # 255: raw inputs are bytes

    def apply(self, x: Tensor) -> Tensor:
        """Scaled records [n, ...] float32 of raw records."""
        return ((x.float() / self.white) - self.mean.to(x.device)) / self.deviation.to(x.device)

    def then(self, other: "Scaling") -> "Scaling":
        """One scaling that has the effect of this one and then the other, whose inputs are this one's results."""
        mean = self.mean + self.deviation * other.mean
        return Scaling(mean, self.deviation * other.deviation, self.white)

    def as_dict(self) -> JsonDict:
        """Plain values, for setup.json; inverse of `from_dict`."""
        return {"white": self.white, "mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @classmethod
    def from_dict(cls, values: JsonDict) -> "Scaling":
        mean, deviation = (torch.tensor(values[name], dtype=torch.float32) for name in ("mean", "deviation"))
        return cls(mean, deviation, float(values["white"]))


def pixel_scaling() -> Scaling:
    """Bytes divided by 255."""
    return Scaling(torch.zeros(()), torch.ones(()), 255.0)


def measure_scaling(public: Inputs, white: float = 1.0) -> Scaling:
    """Mean and deviation of public records that are already divided by `white`.

    There are constants for each feature of [n, features], for each channel of [n, channels, ...], and one pair for
    [n, a, b]. Features that are 0 or 1 in all public records are left as they are, and so are constants.
    """
    if isinstance(public, AugmentedFields):
        raise PdslError("data.scale=public: the data set has random transforms; scale the inputs in them instead")
    if isinstance(public, Fields) or not public.is_floating_point():
        raise PdslError("data.scale=public is for inputs of one float tensor; leave it out and scale them yourself")
    rows = public.double()
    over = {2: (0,), 3: (0, 1, 2)}.get(rows.ndim, (0, *range(2, rows.ndim)))
    mean, deviation = rows.mean(over, keepdim=True)[0], rows.std(over, correction=0, keepdim=True)[0]
    unscaled = ((rows == 0) | (rows == 1)).all(dim=0) if rows.ndim == 2 else torch.zeros_like(mean, dtype=torch.bool)
    mean = torch.where(unscaled, 0.0, mean)
    constant = deviation <= ROUNDING * rows.abs().amax(over, keepdim=True)[0]
    deviation = torch.where(unscaled | constant, 1.0, deviation)
    return Scaling(mean.float(), deviation.float(), white)
