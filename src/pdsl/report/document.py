"""One HTML file that needs nothing else: the frame of every page, and its cards."""

from pathlib import Path

from pdsl.errors import PdslError
from pdsl.report.markup import element, words

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # nothing is ever loaded


def document(title: str, verdict: str, *main: str) -> str:
    css, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        words("title", f"{title} · pdsl"),
        f"<style>{css}</style>",
    ]
    body = [
        element("header", words("h1", title), words("p", verdict)),
        element("main", *main),
        f'<div id="tip" hidden></div><script>{script}</script>',
    ]
    return f'<!doctype html>\n<html lang="en">{element("head", *head)}{element("body", *body)}</html>\n'


def card(title: str, *content: str) -> str:
    return element("section", words("h2", title), *content)


def figure(title: str, caption: str, drawn: str) -> str:
    return card(title, element("figure", drawn, words("figcaption", caption)))


def write_aside(target: Path, html: str) -> Path:
    """Written aside and renamed: a reader finds the old page or the new one, never a part."""
    aside = target.with_name(f".{target.name}.new")
    try:
        aside.write_text(html, encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        raise PdslError(f"cannot write {str(target)!r} ({error.strerror}); check who may write there") from error
    return target
