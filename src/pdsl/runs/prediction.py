"""Predictions for raw inputs: scale them, run the model, and name the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pdsl.data.scaling import Scaling
from pdsl.models.network import run_in_blocks
from pdsl.tasks import Task
from pdsl.training.experiment import Experiment
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Fields, Inputs, describe_shape

Predictions = NDArray[np.int64] | NDArray[np.float64] | NDArray[np.str_]


@dataclass(frozen=True)
class Predictor:
    """A trained model with everything around it: call it with raw inputs."""

    module: nn.Module
    task: Task
    class_names: Sequence[str] = ()
    scaling: Scaling | None = None
    shape: Sequence[int] | None = None  # of one record; None: several inputs
    floats: bool = True  # the model was trained on floats; else on integers

    def __call__(self, x: object) -> Predictions:
        """Class names or numbers, labels [n, labels], or numbers in the units of the targets."""
        inputs = self._read(x)
        try:
            outputs = run_in_blocks(self.module, inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            first_line = next(iter(str(e).splitlines()), type(e).__name__)
            raise PdslError(f"the model does not accept records of shape {describe_shape(inputs)}: {first_line}") from e
        predicted: NDArray[np.int64] = self.task.predict(outputs).numpy()
        if self.class_names and self.task.kind in ("multiclass", "binary"):
            return np.asarray(self.class_names)[predicted]
        return predicted

    def _read(self, x: object) -> Inputs:
        """Raw inputs as scaled tensors of the shape that the model was trained with."""
        if isinstance(x, Fields):
            return x
        if isinstance(x, Mapping) or (isinstance(x, tuple) and self.shape is None):
            named = isinstance(x, Mapping)
            tensors = [_as_tensor(value) for value in (x.values() if isinstance(x, Mapping) else x)]
            return Fields(tensors, list(x) if named else None)
        inputs = _as_tensor(x)
        if self.shape is not None and inputs.shape[1:] != tuple(self.shape):
            if inputs.ndim == 0 or inputs[:1].numel() != int(np.prod(self.shape)):
                raise PdslError(
                    f"records of shape {tuple(inputs.shape[1:])} given; the model was trained on {tuple(self.shape)}"
                )
            inputs = inputs.reshape(len(inputs), *self.shape)
        if self.scaling is not None:
            return self.scaling.apply(inputs)
        return inputs.float() if self.floats else inputs


def _as_tensor(x: object) -> Tensor:
    """A tensor of integers or of float32."""
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype == object:
            raise PdslError("the inputs are not numbers; encode text and categories as for training")
        x = torch.from_numpy(array.copy())
    return x.float() if x.is_floating_point() else x


def predictor_of(e: Experiment, module: nn.Module) -> Predictor:
    """Predictor of an experiment with a trained module."""
    x = e.test[0]
    shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else None
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return Predictor(module, e.task, e.data.class_names, e.data.scaling, shape, floats)
