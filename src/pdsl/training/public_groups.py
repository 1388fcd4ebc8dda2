"""Groups of public records that explain the parties' messages: classes, or deciles of a number."""

import numpy as np
import torch

from pdsl.data.partition import strata
from pdsl.shapley.last_layer import find_last_layer
from pdsl.shapley.masses import PublicGroups, count_records
from pdsl.training.experiment import Experiment


def find_groups(e: Experiment) -> PublicGroups | None:
    """Groups of the public set; None if no linear layer makes the model's output."""
    (inputs, labels), device = e.validation, e.network.device
    layer = find_last_layer(e.network, inputs[:1].to(device))
    if layer is None:
        return None
    n = count_records(layer, labels)
    _, groups = np.unique(strata(labels)[:n], return_inverse=True)
    return PublicGroups(layer, inputs[:n].to(device), labels[:n].to(device), torch.from_numpy(groups).to(device))
