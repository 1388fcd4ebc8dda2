"""One HTML file that needs nothing else: the frame of every page, and its cards."""

from pathlib import Path

from pdsl.errors import PdslError
from pdsl.files import PUBLIC, write_whole
from pdsl.report.markup import element, words
from pdsl.report.picture import styles

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # nothing is ever loaded
FOLLOWING = f"{POLICY}; connect-src 'self'"  # but the page itself, again, where it follows a run
HINT = "Point at a figure for exact values, or tab to it and use the arrow keys."


def document(title: str, verdict: str, *main: str, state: str = "", live: bool = False) -> str:
    """A page; `state` stands above its title, and a `live` one asks again and again for what is new."""
    scripts = ("page.js", "watch.js") if live else ("page.js",)
    script = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in scripts)
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{FOLLOWING if live else POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        words("title", f"{title} · pdsl"),
        f"<style>{styles()}</style>",
    ]
    body = [
        element("header", state, words("h1", title), words("p", verdict)),
        element("main", *main),
        words("footer", HINT),
        f'<div id="tip" role="status" hidden></div><script>{script}</script>',
    ]
    return f'<!doctype html>\n<html lang="en">{element("head", *head)}{element("body", *body)}</html>\n'


def parts(named: dict[str, str]) -> str:
    """Content by name as tabs; one below another, each under its name, where scripts do not run."""
    keys = {name: "-".join(name.lower().split()) for name in named}
    tabs = [
        words("button", name, type="button", role="tab", id=f"tab-{key}", data_part=key, aria_controls=f"part-{key}")
        for name, key in keys.items()
    ]
    panels = [
        element(
            *("div", words("p", name, class_="part"), content),
            **{
                "class": "panel",
                "id": f"part-{keys[name]}",
                "role": "tabpanel",
                "aria_labelledby": f"tab-{keys[name]}",
            },
        )
        for name, content in named.items()
    ]
    return element("div", *tabs, class_="tabs", role="tablist", hidden="hidden") + "".join(panels)


def card(title: str, *content: str) -> str:
    return element("section", words("h2", title), *content)


def figure(title: str, caption: str, drawn: str) -> str:
    return card(title, element("figure", drawn, words("figcaption", caption)))


def write_aside(target: Path, content: str | bytes, mode: int = PUBLIC) -> Path:
    """Written aside and renamed: a reader finds the old file or the new one, never a part."""
    try:
        write_whole(target, content if isinstance(content, bytes) else content.encode(), mode)
    except OSError as error:
        raise PdslError(f"cannot write {str(target)!r} ({error.strerror}); check who may write there") from error
    return target
