"""Installed code that a plan names by its import path: a digest of its source, computed without importing it.

A plan cannot carry code. It can name code that every member has installed, with the SHA-256 of the package's files, and
each member confirms that digest when it joins. The digest is checked again before the code is imported.
"""

import hashlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from pdsl.config import Config
from pdsl.utils.errors import PdslError

PATH = re.compile(r"[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,9}:[A-Za-z_]\w{0,99}", re.ASCII)
MAX_FILES = 20_000  # of a package
MAX_BYTES = 2**28  # of all its files
MIN_CONFIRMED = 16  # digits of a digest by which a member confirms it
SKIPPED = {"__pycache__"}


def code_paths(config: Config) -> dict[str, str]:
    """Import paths in the settings of a plan, by setting: model, loss, metric and feature map."""
    found = {
        "model.name": config.model.name,
        "task.loss": config.task.loss,
        "task.metric": config.task.metric,
        "public.features": config.public.features,
    }
    is_code = {setting for setting, path in found.items() if setting.startswith("task.") or ":" in str(path)}
    return {setting: path for setting, path in found.items() if path is not None and setting in is_code}


def check_paths(config: Config, sources: Mapping[str, str]) -> None:
    """Raise PdslError unless the plan has a digest for each import path in its settings, and no other."""
    paths = code_paths(config)
    for setting, path in paths.items():
        check_path(path, f"plan: {setting}")
    if set(paths.values()) != set(sources):
        odd = sorted(set(paths.values()) ^ set(sources))[0]
        raise PdslError(f"plan: sources and settings do not name the same code: {odd!r:.120} is in one of them only")


def check_path(path: str, where: str) -> None:
    """Raise PdslError unless this is package.module:name, outside of Python's standard library."""
    if not PATH.fullmatch(path):
        raise PdslError(f"{where}={path!r:.120} is not package.module:name; correct it")
    package = _top(path)
    if package in sys.stdlib_module_names or package in ("pdsl", "torch"):
        raise PdslError(f"{where}={path:.120}: {package} is not a package of models; name your own installed package")


def source_sha256(path: str) -> str:
    """SHA-256 over all files of the installed top-level package of an import path, with their names.

    The package is found, not imported. Byte-code caches are left out.
    """
    digest = hashlib.sha256()
    for name, file in _files(path):
        try:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as e:
            raise PdslError(f"{file}: {e.strerror}; install the package of {path} again") from e
        digest.update(f"{content}  {name}\n".encode())
    return digest.hexdigest()


def source_folder(path: str) -> Path:
    """Folder or file of the installed package, for a member who wants to read it."""
    spec = _find(path)
    return Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))


def check_sources(sources: Mapping[str, str]) -> None:
    """Raise PdslError unless each installed package has the digest that the plan agreed on."""
    for path, expected in sources.items():
        if (found := source_sha256(path)) != expected:
            raise PdslError(
                f"the installed source of {path} differs from the plan's: SHA-256 {found[:16]}…, not {expected[:16]}…;"
                " install the version that the plan's author used, or get a new plan"
            )


def check_confirmed(sources: Mapping[str, str], confirmed: Collection[str]) -> None:
    """Raise PdslError unless each digest was confirmed by at least its first MIN_CONFIRMED digits."""
    for path, digest in sources.items():
        if not any(len(start) >= MIN_CONFIRMED and digest.startswith(start) for start in confirmed):
            raise PdslError(
                f"the plan runs installed code, {path} in {source_folder(path)}; read it, compare its SHA-256 {digest}"
                f" with the other members, then add: --code {digest[:MIN_CONFIRMED]}"
            )


def _top(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


def _find(path: str) -> ModuleSpec:
    """The top-level package or module of an import path; no code of it runs."""
    try:
        spec = find_spec(_top(path))
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.has_location:
        raise PdslError(f"{path}: no installed package {_top(path)}; install the package that the plan's author names")
    return spec


def _files(path: str) -> Iterator[tuple[str, Path]]:
    """Names and paths of all files of the package, in order."""
    spec = _find(path)
    if spec.submodule_search_locations is None:
        yield Path(str(spec.origin)).name, Path(str(spec.origin))
        return
    (folder,) = map(Path, spec.submodule_search_locations)
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    kept = {name: file for name, file in files.items() if not SKIPPED & set(file.relative_to(folder).parts)}
    if len(kept) > MAX_FILES or sum(file.stat().st_size for file in kept.values()) > MAX_BYTES:
        raise PdslError(f"{path}: its package has over {MAX_FILES:,} files or {MAX_BYTES:,} bytes; name a smaller one")
    yield from sorted(kept.items())
