"""Types shared by all packages."""

from typing import Any

JsonDict = dict[str, Any]  # nested plain values, as JSON, TOML and settings have them
