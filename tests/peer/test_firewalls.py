"""Organisations in network namespaces without any route from outside: only an HTTP proxy leads out."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import proxy
from tests.stress.soak import Site, create_organisations, forkserver, ledger_matches_log, peer_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root"),
]

ROUNDS = 8
PROXY = "10.78.0.100"
SETTINGS = [
    f"rounds={ROUNDS}", "model.name=softmax", "graph.kind=full", "algorithm.shapley.weighting=uniform",
    "privacy.noise_multiplier=1.0", "privacy.target_epsilon=100",
]  # fmt: skip


def proxied_process(folder: str, namespace: str | None, max_file_bytes: int | None, log: str) -> None:
    os.environ["https_proxy"] = f"http://{PROXY}:3128"
    peer_process(folder, namespace, max_file_bytes, log)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Networks:
    """Two networks, open and closed, that share one machine: a proxy that forwards no packets."""

    def __init__(self) -> None:
        prefix = f"pdslfw{os.getpid()}-"
        self.open, self.closed = [f"{prefix}{i}" for i in (0, 1)], [f"{prefix}{i}" for i in (2, 3)]
        self.proxy = f"{prefix}proxy"
        self.all = [*self.open, *self.closed, self.proxy]
        for name in self.all:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for net, names in ((77, self.open), (78, self.closed)):
            bridge = f"net{net}"
            ip("-n", self.proxy, "link", "add", bridge, "type", "bridge")
            ip("-n", self.proxy, "link", "set", bridge, "up")
            ip("-n", self.proxy, "addr", "add", f"10.{net}.0.100/24", "dev", bridge)
            for i, name in enumerate(names):
                port = f"p{net}{i}"
                ip("-n", self.proxy, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", self.proxy, "link", "set", port, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"10.{net}.0.{i + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.all:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks()
    yield made
    made.remove()


def reaches(namespace: str, host: str) -> bool:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c"]
    program = f"import socket; socket.create_connection(('{host}', 3128), 2)"
    return subprocess.run([*command, program], capture_output=True, check=False).returncode == 0


def test_two_of_four_organisations_without_inbound_route_finish_a_run(
    tmp_path: Path, networks: Networks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    addresses = ["10.77.0.1:7443", "10.77.0.2:7443", "none", "none"]
    create_organisations(tmp_path, addresses, SETTINGS, {"silence": 15.0, "deadline": 60.0, "start": 120.0})
    command = ["ip", "netns", "exec", networks.proxy, sys.executable, proxy.__file__]
    with subprocess.Popen([*command, "0.0.0.0", "3128"]) as running:
        context = forkserver()
        sites = [Site(tmp_path / f"org-{i}", name, context) for i, name in enumerate(networks.open)]
        sites += [
            Site(tmp_path / f"org-{i + 2}", name, context, proxied_process) for i, name in enumerate(networks.closed)
        ]
        try:
            end = time.monotonic() + 30
            while not reaches(networks.closed[0], PROXY):
                assert time.monotonic() < end
            assert not reaches(networks.open[0], "10.78.0.1") and not reaches(networks.closed[0], "10.77.0.1")
            for site in sites:
                site.start()
            for site in sites:
                site.process.join(300)
        finally:
            running.kill()
            for site in sites:
                site.signal(9)
    logs = [(site.folder / "process.log").read_text()[-300:] for site in sites]
    assert [site.process.exitcode for site in sites] == [0] * 4, logs
    for site in sites:
        assert [row for row in site.rows if len(row["present"]) < 3 or "lost" in row] == [] and len(site.rows) == ROUNDS
        assert ledger_matches_log(site)
