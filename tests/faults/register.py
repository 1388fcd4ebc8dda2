"""All planted faults, in the order of their classes: importing a module registers its faults."""

from tests.faults import (
    accounting,
    clean_data,
    clipping,
    files,
    keys,
    models,
    noise_independence,
    noise_shape,
    noise_size,
    public,
    sampler,
)
from tests.faults.base import FAULTS

__all__ = ["FAULTS"]
MODULES = (
    noise_size, noise_shape, noise_independence, keys, sampler, clipping, clean_data, public, accounting, models, files
)  # fmt: skip
