"""Objects that a user names by import path: `package.module:name`."""

import importlib
import sys
from pathlib import Path

from pdsl.errors import PdslError


def import_object(path: str, setting: str) -> object:
    """The object at `package.module:name`, found in the working directory too; PdslError if there is none."""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: object = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as e:  # the last two: '.name' and no name at all
        raise PdslError(f"{setting}={path}: {e}; try package.module:name, importable from here") from e
    return found
