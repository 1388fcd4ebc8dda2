"""Serve the live report of a run on localhost. Nothing is written to disk."""

import hashlib
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import localtime, strftime
from typing import Any

from pdsl.report.document import LiveStatus, render
from pdsl.report.page import render_report
from pdsl.report.run_data import Run, read_run
from pdsl.utils.errors import PdslError

ADDRESS = "127.0.0.1"
WATCHED = ("config.toml", "setup.json", "rows.jsonl", "summary.json", "contributions.json")


def server(run: Path, port: int) -> ThreadingHTTPServer:
    """Create a server of the live report; port 0 picks a free port. PdslError if the run or the port is missing."""
    if not run.is_dir():
        raise PdslError(f"there is no run directory {str(run)!r}; start the run first, then watch it")
    try:
        return Server((ADDRESS, port), _handler(_LiveReport(run)))
    except OSError as error:
        raise PdslError(f"cannot listen at port {port} ({error.strerror}); choose another with --port") from error


class Server(ThreadingHTTPServer):
    daemon_threads = True  # do not wait for browsers that keep their connection open

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors, except a browser that closes its connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _LiveReport:
    """The current report, rendered again when one of its files changes."""

    def __init__(self, run: Path):
        self._run = run
        self._rendered: tuple[object, bytes] | None = None

    def __call__(self) -> bytes:
        files = [self._run / name for name in WATCHED]
        state = [(stat.st_mtime_ns, stat.st_size) if (stat := _stat(file)) else None for file in files]
        if self._rendered is None or self._rendered[0] != state:
            self._rendered = (state, render_live(self._run).encode())
        return self._rendered[1]


def render_live(path: Path) -> str:
    """Render the report of a run; before its first round, or if a file is invalid, a document that says so."""
    try:
        run = read_run(path)
    except PdslError as error:
        waiting = "no round has ended yet" in str(error) or not (path / "rows.jsonl").exists()
        message = "Waiting for the first round to end." if waiting else str(error)
        return render("base.html.j2", title=path.resolve().name, verdict=message, live=LiveStatus())
    return render_report(run, _status(run, path))


def _status(run: Run, path: Path) -> LiveStatus:
    if run.summary:
        return LiveStatus("Finished.")
    done, total = run.rounds[-1].number, run.config.get("rounds")
    stat = _stat(path / "rows.jsonl")
    when = f", updated {strftime('%H:%M:%S', localtime(stat.st_mtime))}" if stat else ""
    text = f"Live: round {done} of {total or '?'}{when}"
    return LiveStatus(text, done, total if isinstance(total, int) else None)


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:
        return None


def _handler(current: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Serve GET / only, and only for this host name, which prevents DNS rebinding."""

        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if self.headers.get("Host") not in self._names():
                self._reply(403, b"only for this machine\n")
            elif self.path != "/":
                self._reply(404, b"there is only /\n")
            else:
                html = current()
                tag = f'"{hashlib.sha256(html).hexdigest()}"'
                changed = self.headers.get("If-None-Match") != tag
                self._reply(200 if changed else 304, html if changed else b"", ETag=tag)

        def _names(self) -> tuple[str, str]:
            port = self.connection.getsockname()[1]
            return f"{ADDRESS}:{port}", f"localhost:{port}"

        def _reply(self, code: int, body: bytes, **more: str) -> None:
            headers = {
                "Content-Type": f"text/{'html' if code == 200 else 'plain'}; charset=utf-8",
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
            }
            self.send_response(code)
            for name, value in (headers | more).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because browsers ask every second."""

    return Handler
