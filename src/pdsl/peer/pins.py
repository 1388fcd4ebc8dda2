"""Pins: the certificates a peer accepts, and whose they are.

A neighbour has one pin, or two while it changes its key. There is a file per neighbour, `pins/<name>.pem`; taking a
certificate out of it revokes it, at once. Nothing else, no authority and no name, makes a certificate good.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.peer.identity import Card, canonical, fingerprint

MOST = 2  # the one in use, and the next one


@dataclass(frozen=True)
class Pins:
    folder: Path  # pins/

    def of(self, name: str) -> list[str]:
        """The pinned certificates of a neighbour, as PEM; none if it was revoked."""
        file = self._file(name)
        try:
            return list(_parsed(file.read_bytes(), name, str(file)))
        except FileNotFoundError:
            return []
        except OSError as e:
            raise PdslError(f"{file}: {e.strerror}; join the plan again, or pin the neighbour's card") from e

    def add(self, card: Card) -> None:
        """Accept this certificate too. The oldest of two must be removed first: nobody is dropped silently."""
        pems = self.of(card.name)
        if card.certificate in pems:
            return
        if len(pems) == MOST:
            raise PdslError(
                f"{card.name} has {MOST} pins already; remove one first: pdsl peer pin FOLDER --revoke"
                f" {fingerprint(pems[0])[:16]}"
            )
        self._write(card.name, [*pems, card.certificate])

    def revoke(self, start: str) -> Card:
        """Remove the pin whose fingerprint begins so. Returns whose it was (its address is not known here)."""
        found = [
            (file.stem, pem)
            for file in sorted(self.folder.glob("*.pem"))
            for pem in self.of(file.stem)
            if fingerprint(pem).startswith(start)
        ]
        if len(found) != 1 or len(start) < 8:
            raise PdslError(
                f"{len(found)} pins begin with {start!r}; give at least 8 digits of one fingerprint,"
                " as 'pdsl peer status' shows them"
            )
        ((name, pem),) = found
        self._write(name, [other for other in self.of(name) if other != pem])
        return Card(name, "", pem)

    def _write(self, name: str, pems: list[str]) -> None:
        self.folder.mkdir(exist_ok=True)
        write_whole(self._file(name), "".join(pems).encode())

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.pem"


@lru_cache(maxsize=1024)
def _parsed(content: bytes, name: str, where: str) -> tuple[str, ...]:
    """The certificates of a pin file; a server asks for them at every call."""
    if not content.strip():
        return ()
    try:
        certificates = x509.load_pem_x509_certificates(content)
    except (ValueError, x509.InvalidVersion) as e:
        raise PdslError(f"{where} is damaged; join the plan again, or pin the neighbour's card") from e
    if len(certificates) > MOST:
        raise PdslError(f"{where} has {len(certificates)} certificates; leave at most {MOST}")
    pems = (certificate.public_bytes(serialization.Encoding.PEM).decode() for certificate in certificates)
    return tuple(canonical(pem, name, where) for pem in pems)
