"""Engines move rows of numbers between agents. All share one interface, so each algorithm is written once."""

from pdsl.engine.base import Engine
from pdsl.engine.local import LocalEngine

__all__ = ["Engine", "LocalEngine"]
