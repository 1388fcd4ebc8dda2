"""Render HTML templates, and write files atomically."""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from pdsl.report.glossary import define, explain
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PUBLIC, write_whole

TEMPLATES = Environment(
    loader=PackageLoader("pdsl.report"),
    autoescape=True,  # names and settings of a run may contain markup
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["explain"] = explain
TEMPLATES.filters["define"] = define


@dataclass(frozen=True)
class LiveStatus:
    """The line above the title of a live report, with a progress bar if the number of rounds is known."""

    text: str = ""
    done: int = 0
    total: int | None = None


def render(
    template: str, *, title: str, verdict: str, badge: str = "", live: LiveStatus | None = None, **context: object
) -> str:
    """Render a self-contained HTML document. `badge`: a warning beside the verdict. A `live` one reloads itself."""
    return TEMPLATES.get_template(template).render(title=title, verdict=verdict, badge=badge, live=live, **context)


def write_file(target: Path, content: str | bytes, mode: int = PUBLIC) -> Path:
    """Write a file and return its path. Readers see the old content or the new one, never a part."""
    try:
        write_whole(target, content if isinstance(content, bytes) else content.encode(), mode)
    except OSError as error:
        raise PdslError(f"cannot write {str(target)!r} ({error.strerror}); check who may write there") from error
    return target
