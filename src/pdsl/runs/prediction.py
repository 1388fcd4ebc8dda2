"""Predictions for raw inputs: read and scale them, run the model, and name the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pdsl.data.raw import WHERE, read_raw, to_tensor
from pdsl.data.scaling import Scaling
from pdsl.data.validation import Schema, as_array, convert_inputs
from pdsl.models.network import run_in_blocks
from pdsl.public.features import extract
from pdsl.tasks import Task
from pdsl.training.experiment import Experiment
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Fields, Inputs, describe_shape
from pdsl.utils.workers import Workers

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
    schema: Schema = field(default_factory=dict)  # columns of the training data, with their categories
    features: nn.Module | None = None  # feature map before the model

    def __call__(self, x: object) -> Predictions:
        """Class names or numbers, labels [n, labels] as 0 or 1, or numbers in the units of the targets."""
        predicted: NDArray[np.int64] = self.task.predict(self.run(x)).numpy()
        if self.class_names and self.task.kind in ("multiclass", "binary"):
            return np.asarray(self.class_names)[predicted]
        return predicted

    def probabilities(self, x: object) -> NDArray[np.float64]:
        """Probability of each class or label [n, classes]."""
        outputs = self.run(x).double()
        if self.task.kind == "multiclass":
            return outputs.softmax(1).numpy()
        p = outputs.sigmoid().reshape(len(outputs), -1)
        if self.task.kind == "binary":
            return torch.cat([1 - p, p], dim=1).numpy()
        if self.task.kind == "multilabel":
            return p.numpy()
        raise PdslError(f"the task {self.task.kind} has no probabilities; use predict")

    def run(self, x: object) -> Tensor:
        """Outputs of the model for raw inputs."""
        inputs = self._read(x)
        try:
            if self.features is not None:
                with Workers() as workers:
                    inputs = extract(self.features, inputs, workers, "cpu", "features")
            return run_in_blocks(self.module, inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            first_line = next(iter(str(e).splitlines()), type(e).__name__)
            raise PdslError(f"the model does not accept records of shape {describe_shape(inputs)}: {first_line}") from e

    def _read(self, x: object) -> Inputs:
        """Raw inputs as scaled tensors of the shape that the model was trained with."""
        if isinstance(x, Fields):
            return x
        raw, divided = read_raw(x, self.schema, self.shape is not None)
        if isinstance(raw, Mapping) or (isinstance(raw, tuple) and self.shape is None):
            values = raw.values() if isinstance(raw, Mapping) else raw
            has_bytes = any(as_array(value, WHERE).dtype == np.uint8 for value in values)
            return convert_inputs(raw, WHERE, has_bytes and self.scaling is not None).x
        inputs = to_tensor(raw)
        if self.shape is not None and inputs.shape[1:] != tuple(self.shape):
            if inputs.ndim == 0 or inputs[:1].numel() != int(np.prod(self.shape)):
                hint = "; for one record give x[None]" if inputs.shape == tuple(self.shape) else ""
                raise PdslError(
                    f"records of shape {tuple(inputs.shape[1:])} given; the model was trained on"
                    f" {tuple(self.shape)}{hint}"
                )
            inputs = inputs.reshape(len(inputs), *self.shape)
        if self.scaling is not None:
            return (replace(self.scaling, white=1.0) if divided else self.scaling).apply(inputs)
        return inputs.float() if self.floats else inputs


def predictor_of(e: Experiment, module: nn.Module) -> Predictor:
    """Predictor of an experiment with a trained module."""
    features = e.public.features
    return Predictor(
        module,
        e.task,
        e.data.class_names,
        e.data.scaling,
        raw_shape(e),
        has_floats(e),
        schema_of(e),
        None if features is None else features.module,
    )


def raw_shape(e: Experiment) -> tuple[int, ...] | None:
    """Shape of a record before any feature map; None if it has several tensors."""
    if e.public.features is not None:
        return e.public.raw_shape
    return tuple(e.test[0].shape[1:]) if isinstance(e.test[0], Tensor) else None


def has_floats(e: Experiment) -> bool:
    """Whether records are one tensor of floats before any feature map."""
    x = e.test[0] if e.public.raw is None else e.public.raw.test_x
    return isinstance(x, Tensor) and x.is_floating_point()


def schema_of(e: Experiment) -> Schema:
    """Columns of the training data with their declared categories: public, because no record decides on them."""
    return e.data.schema or dict.fromkeys(e.data.features, ())
