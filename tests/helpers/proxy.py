"""HTTP proxy for tests: python tests/helpers/proxy.py HOST PORT."""

import base64
import socket
import sys
import threading
from contextlib import suppress


class Proxy:
    """Proxy that connects to any address, optionally only with a password, and remembers the addresses."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, password: str | None = None):
        self.targets: list[str] = []
        self._password = password
        self.server = socket.create_server((host, port))
        self.port = self.server.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        if self._password is not None and base64.b64encode(self._password.encode()) not in head:
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            client.close()
            return
        target = head.split()[1].decode()
        self.targets.append(target)
        host, _, port = target.partition(":")
        try:
            server = socket.create_connection((host, int(port)), timeout=5)
        except OSError:
            client.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            client.close()
            return
        server.settimeout(None)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        threading.Thread(target=_copy, args=(server, client), daemon=True).start()
        _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # a socket that another thread reads is not closed otherwise
        end.close()


if __name__ == "__main__":
    Proxy(sys.argv[1], int(sys.argv[2])).run()
