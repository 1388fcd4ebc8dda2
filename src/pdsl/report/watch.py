"""The page of a run while it goes on, served to this machine alone. Nothing is written."""

import hashlib
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import localtime, strftime
from typing import Any

from pdsl.errors import PdslError
from pdsl.report.document import document
from pdsl.report.markup import element, words
from pdsl.report.page import page
from pdsl.report.reading import Run, read_run

ADDRESS = "127.0.0.1"
SHOWN = ("config.toml", "setup.json", "rows.jsonl", "summary.json")


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """A server of the run's page at a port, any free one for 0; PdslError where there is no run or no such port."""
    if not run.is_dir():
        raise PdslError(f"there is no run directory {str(run)!r}; start the run first, then watch it")
    try:
        return Server((ADDRESS, port), _handler(_Page(run)))
    except OSError as error:
        raise PdslError(f"cannot listen at port {port} ({error.strerror}); choose another with --port") from error


class Server(ThreadingHTTPServer):
    daemon_threads = True  # nobody waits for a browser that keeps its connection

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error; any other is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Page:
    """The page as it stands, made anew when one of its files has changed."""

    def __init__(self, run: Path):
        self._run = run
        self._made: tuple[object, bytes] | None = None

    def __call__(self) -> bytes:
        files = [self._run / name for name in SHOWN]
        state = [(stat.st_mtime_ns, stat.st_size) if (stat := _stat(file)) else None for file in files]
        if self._made is None or self._made[0] != state:
            self._made = (state, following(self._run).encode())
        return self._made[1]


def following(path: Path) -> str:
    """The page of a run that may go on; before its first round, or where something is broken, a page that says so."""
    try:
        run = read_run(path)
    except PdslError as error:
        waiting = "no round has ended yet" in str(error) or not (path / "rows.jsonl").exists()
        said = "Waiting for the first round to end." if waiting else str(error)
        return document(path.resolve().name, said, state=words("p", "", class_="state"), live=True)
    return page(run, _state(run, path), live=True)


def _state(run: Run, path: Path) -> str:
    done, asked = run.rows[-1]["round"], run.config.get("rounds")
    if run.summary:
        return words("p", "Finished.", class_="state")
    stat = _stat(path / "rows.jsonl")
    when = f", ended at {strftime('%H:%M:%S', localtime(stat.st_mtime))}" if stat else ""
    said = words("span", f"Following: round {done} of {asked or '?'}{when}.")
    bar = element("progress", "", value=done, max=asked) if isinstance(asked, int) else ""
    return element("p", said, bar, class_="state")


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:
        return None


def _handler(current: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """GET / and nothing else, for pages of this address: a name that was bent to it is refused."""

        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if self.headers.get("Host") not in self._names():
                self._answer(403, b"for this machine only\n", {})
            elif self.path != "/":
                self._answer(404, b"there is only /\n", {})
            else:
                html = current()
                tag = f'"{hashlib.sha256(html).hexdigest()}"'
                fresh = self.headers.get("If-None-Match") != tag
                self._answer(200 if fresh else 304, html if fresh else b"", {"ETag": tag})

        def _names(self) -> tuple[str, str]:
            port = self.connection.getsockname()[1]
            return f"{ADDRESS}:{port}", f"localhost:{port}"

        def _answer(self, code: int, body: bytes, more: dict[str, str]) -> None:
            self.send_response(code)
            kind = "text/html" if code == 200 else "text/plain"
            fixed = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in {
                **fixed,
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                **more,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads a line for every second."""

    return Handler
