"""`pdsl watch`: serves a live report on localhost only, updates it after each round, and writes no files."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from pdsl.report.watch import server
from tests.helpers.commands import pdsl
from tests.helpers.refusals import refused
from tests.report.test_report import a_row, make_run, read_rows, write_rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", T=5, end=False)
    write_rows(run, read_rows(run)[:2])
    return run


@pytest.fixture
def serving(run: Path) -> Iterator[ThreadingHTTPServer]:
    with server(run, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def ask(
    serving: ThreadingHTTPServer, method: str = "GET", path: str = "/", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.server_port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_is_new_when_a_row_is(serving: ThreadingHTTPServer, run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    code, headers, body = ask(serving)
    assert code == 200
    assert "Live: round 2 of 5, updated " in body
    assert "connect-src 'self'" in body
    assert ask(serving, If_None_Match=headers["ETag"])[::2] == (304, "")
    with (run / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(a_row(3, 12)) + "\n")
    code, _, body = ask(serving, If_None_Match=headers["ETag"])
    assert code == 200
    assert "Live: round 3 of 5, updated " in body
    assert sorted(path.name for path in run.iterdir()) == before


def test_before_the_first_row_and_when_something_is_broken(serving: ThreadingHTTPServer, run: Path) -> None:
    (run / "rows.jsonl").unlink()
    assert "Waiting for the first round" in ask(serving)[2]
    write_rows(run, [])
    assert "Waiting for the first round" in ask(serving)[2]
    (run / "rows.jsonl").write_text("not json\n")
    assert "rows.jsonl" in ask(serving)[2]


def test_only_this_page_and_only_for_this_machine(serving: ThreadingHTTPServer) -> None:
    assert serving.server_address[0] == "127.0.0.1"
    assert ask(serving, Host=f"localhost:{serving.server_port}")[0] == 200
    for host in ("evil.example", f"evil.example:{serving.server_port}", "127.0.0.1", ""):
        assert ask(serving, Host=host)[0] == 403
    for path in ("/rows.jsonl", "/../secret.key", "/secret.key", "/?x"):
        assert ask(serving, path=path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(serving, method)[0] == 501


def test_a_browser_that_goes_away_is_no_error(serving: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()
    shutdown_request = serving.shutdown_request
    serving.shutdown_request = lambda request: (shutdown_request(request), ended.set())  # type: ignore
    browser = socket.create_connection(("127.0.0.1", serving.server_port))
    browser.sendall(b"GET / HTTP/1.1\r\n")
    browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset
    browser.close()
    assert ended.wait(10)
    assert capsys.readouterr().err == ""
    try:
        raise ValueError("ours")
    except ValueError:
        serving.handle_error(browser, ("127.0.0.1", 1))
    assert "ValueError: ours" in capsys.readouterr().err


def test_mistakes_are_refused(serving: ThreadingHTTPServer, run: Path, tmp_path: Path) -> None:
    pdsl("watch", tmp_path / "nowhere").refused("there is no run directory", "start the run first")
    with refused(f"cannot listen at port {serving.server_port}", "--port"):
        server(run, serving.server_port)
