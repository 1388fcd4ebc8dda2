"""Groups of public records that explain the parties' messages: classes, or deciles of a number."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.data.partition import strata
from pdsl.shapley.last_layer import LastLayer, find_last_layer
from pdsl.shapley.masses import count_records
from pdsl.training.experiment import Experiment
from pdsl.utils.inputs import Inputs


@dataclass(frozen=True)
class PublicGroups:
    """The first public records, their groups, and the layer whose gradients they explain."""

    layer: LastLayer
    inputs: Inputs  # [n, ...] on the network's device
    labels: Tensor  # [n]
    groups: Tensor  # [n] group of each record: 0, …, G-1; every group has a record

    @property
    def count(self) -> int:
        """Number of groups G."""
        return int(self.groups.max()) + 1


def find_groups(e: Experiment) -> PublicGroups | None:
    """Groups of the public set; None if no linear layer makes the model's output."""
    (inputs, labels), device = e.validation, e.network.device
    layer = find_last_layer(e.network, inputs[:1].to(device))
    if layer is None:
        return None
    n = count_records(layer, labels)
    _, groups = np.unique(strata(labels)[:n], return_inverse=True)
    return PublicGroups(layer, inputs[:n].to(device), labels[:n].to(device), torch.from_numpy(groups).to(device))
