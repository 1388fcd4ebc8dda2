"""Files in deploy/ and the Dockerfile: the service unit is valid, and the containers' commands work as process 1."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pdsl.peer.demo import NAMES
from pdsl.utils.random import KEY_BYTES

pytestmark = [pytest.mark.peer, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
ROUNDS = 1000  # more than the test waits for
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mount and process namespaces need root"
)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_service_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    unit = tmp_path / "pdsl-peer.service"
    command = tmp_path / "pdsl"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    text = (ROOT / "deploy" / "pdsl-peer.service").read_text()
    assert "RestartPreventExitStatus=2 3" in text
    unit.write_text(
        text.replace("/opt/pdsl/bin/pdsl", str(command)).replace("=pdsl\nGroup=pdsl", "=games\nGroup=games")
    )
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    secured = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit)]
    assert subprocess.run(secured, capture_output=True).returncode == 0  # an exposure of at most 2.5 of 10


class Container:
    """A service of the Compose file as process 1 of its own namespaces; host names are addresses of this machine."""

    def __init__(self, service: dict[str, Any], place: Path, hosts: Path):
        (volume,) = service["volumes"]
        self.folder = place / volume.partition(":")[0]
        entry = next(line for line in dockerfile_stage("peer") if line.startswith("ENTRYPOINT "))
        self._command = [*json.loads(entry.partition(" ")[2]), *service["command"]]
        self._hosts, self.log = hosts, place / f"{self.folder.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def argv(self, command: list[str]) -> list[str]:
        found = [str(self.folder) if word == "/peer" else word for word in command[1:]]
        return [sys.executable, "-m", "pdsl", *found]

    def start(self) -> None:
        inside = f'mount --bind "{self._hosts}" /etc/hosts && exec "$@"'
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inside, "sh"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*unshare, *self.argv(self._command)], stdout=log, stderr=log)

    @property
    def first(self) -> int:
        """Number of the container's process 1, seen from outside."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def signal(self, number: int) -> None:
        os.kill(self.first, number)

    def handles_sigterm(self) -> bool:
        try:
            status = Path(f"/proc/{self.first}/status").read_text()
        except (IndexError, FileNotFoundError):
            return False
        (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")]
        return bool(caught >> signal.SIGTERM - 1 & 1)

    def is_healthy(self) -> bool:
        (check,) = [line for line in dockerfile_stage("peer") if line.startswith("HEALTHCHECK ")]
        command = json.loads(check.partition(" CMD ")[2])
        return subprocess.run(self.argv(command), capture_output=True).returncode == 0

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def dockerfile_stage(name: str) -> list[str]:
    text = (ROOT / "Dockerfile").read_text()
    (stage,) = [part for part in text.split("FROM ") if part.partition("\n")[0].endswith(f" AS {name}")]
    return stage.splitlines()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[list[Container]]:
    script = [sys.executable, str(ROOT / "deploy" / "create_organisations.py"), str(tmp_path / "organisations")]
    subprocess.run([*script, "--rounds", str(ROUNDS)], check=True, capture_output=True)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.9.{i + 1} {name}\n" for i, name in enumerate(NAMES)))
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    assert tuple(services) == NAMES
    made = [Container(service, tmp_path, hosts) for service in services.values()]
    with ExitStack() as stack:
        for container in made:
            stack.callback(lambda container=container: container.process and container.process.kill())
        yield made


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def trained_rounds(container: Container) -> int:
    file = container.folder / "run" / "rows.jsonl"
    return file.read_text().count('"present"') if file.exists() else 0


@needs_namespaces
def test_containers_train_end_on_sigterm_as_process_1_and_resume(containers: list[Container]) -> None:
    ended, *others = containers
    for container in containers:
        container.start()
    until(lambda: all(trained_rounds(container) >= 3 for container in containers))
    assert ended.is_healthy()
    began = time.monotonic()
    ended.signal(signal.SIGTERM)
    assert ended.process is not None
    code = ended.process.wait(10)
    assert time.monotonic() - began < 5
    assert code == 128 + signal.SIGTERM
    assert ended.events[-1]["event"] == "interrupted"
    assert not ended.is_healthy()
    at = trained_rounds(ended)
    ended.start()
    until(lambda: trained_rounds(ended) >= at + 3)
    for container in containers:
        container.signal(signal.SIGTERM)
    assert [container.process and container.process.wait(10) for container in containers] == [128 + signal.SIGTERM] * 4
    neighbours = [container for container in others if any(e["event"] == "goodbye" for e in container.events)]
    assert len(neighbours) >= 2  # on a ring
    for container in containers:
        assert {event["event"] for event in container.events} >= {"start", "round", "interrupted"}
        check_no_secrets(container)


def check_no_secrets(container: Container) -> None:
    """Neither logs nor status contain keys, or the number of private records."""
    folder = container.folder
    secrets = [line for line in (folder / "key.pem").read_text().splitlines() if not line.startswith("-")]
    for key in (folder / "run").glob("secret-*.key"):
        content = key.read_bytes()
        assert len(content) == KEY_BYTES
        secrets += [content.hex(), content.hex().upper()]
    records = len(np.load(folder / "data.npz")["y"])
    for file in (container.log, folder / "run" / "events.jsonl", folder / "run" / "status.json"):
        text = file.read_text() if file.exists() else ""
        assert not any(secret in text for secret in secrets)
    numbers = [value for event in container.events for value in event.values() if isinstance(value, int)]
    assert records not in numbers


@needs_namespaces
def test_sigterm_during_the_start_ends_process_1(containers: list[Container]) -> None:
    """Most of a start is imports."""
    first = containers[0]
    first.start()
    assert first.process is not None
    until(first.handles_sigterm)
    began = time.monotonic()
    first.signal(signal.SIGTERM)
    assert first.process.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
