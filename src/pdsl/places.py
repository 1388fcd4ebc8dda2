"""Where results are to go: looked at before anything is done, so that a mistake costs no run and leaves nothing."""

from pathlib import Path
from tempfile import TemporaryFile

from pdsl.errors import PdslError


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that could not be written to, or made; nothing is made now."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryFile(dir=there):
            pass
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another {option}") from e


def check_file(file: Path, option: str) -> None:
    """Refuse a file that could not be written: its folder has to be there already."""
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise PdslError(f"cannot write {file}: {why}; choose another {option}")
    check_folder(file.parent, option)
