"""Where agents live and how rows travel between them. One interface, so that each algorithm is written once."""

from pdsl.engine.base import Engine
from pdsl.engine.local import Local

__all__ = ["Engine", "Local"]
