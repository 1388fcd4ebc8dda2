"""Import of objects by path: `package.module:name`."""

import importlib
import sys
from pathlib import Path

from pdsl.utils.errors import PdslError


def import_object(path: str, setting: str) -> object:
    """Import `package.module:name`, also from the working directory; PdslError if it does not exist."""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: object = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as e:  # the last two: '.name' and an empty name
        raise PdslError(f"{setting}={path}: {e}; try package.module:name, importable from here") from e
    return found
