"""Callbacks for `pdsl.train(..., callbacks=[...])`. Your own are subclasses of `pdsl.RunListener`."""

from pdsl.runs.callbacks import BestModel, EarlyStopping
from pdsl.runs.listeners import RunListener, StopTraining
from pdsl.runs.loggers import MLflow, TensorBoard, WandB

__all__ = ["BestModel", "EarlyStopping", "MLflow", "RunListener", "StopTraining", "TensorBoard", "WandB"]
