"""Pins: the certificates a peer accepts, and whose they are.

A neighbour has one pin, or two while it changes its key. There is a file per neighbour, `pins/<name>.pem`; taking a
certificate out of it revokes it, at once. Nothing else, no authority and no name, makes a certificate good.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.peer.identity import Card, canonical, fingerprint

MOST = 2  # the one in use, and the next one


class DamagedPinsError(PdslError):
    """A pin file cannot be used, so that nobody is accepted by it."""

    def __init__(self, file: Path, why: str):
        super().__init__(
            f"{file}: {why}; pin the neighbour's card in its place: pdsl peer pin {file.parent.parent} CARD"
        )


@dataclass(frozen=True)
class Pins:
    folder: Path  # pins/

    def of(self, name: str) -> list[str]:
        """The pinned certificates of a neighbour, as PEM; none if it was revoked."""
        file = self._file(name)
        try:
            return list(_parsed(file.read_bytes(), name, file))
        except FileNotFoundError:
            return []
        except OSError as e:
            raise DamagedPinsError(file, e.strerror or "cannot be read") from e

    def add(self, card: Card) -> bool:
        """Accept this certificate too. The oldest of two must be removed first: nobody is dropped silently.

        A damaged file is replaced by this certificate alone. Returns whether it was.
        """
        try:
            pems = self.of(card.name)
        except DamagedPinsError:
            self._write(card.name, [card.certificate])
            return True
        if card.certificate in pems:
            return False
        if len(pems) == MOST:
            raise PdslError(
                f"{card.name} has {MOST} pins already; remove one first: pdsl peer pin FOLDER --revoke"
                f" {fingerprint(pems[0])[:16]}"
            )
        self._write(card.name, [*pems, card.certificate])
        return False

    def revoke(self, start: str) -> Card:
        """Remove the pin whose fingerprint begins so. Returns whose it was (its address is not known here)."""
        found: list[tuple[str, str]] = []
        for file in sorted(self.folder.glob("*.pem")):
            with suppress(DamagedPinsError):  # which accepts nobody, and must not keep others from being revoked
                found += [(file.stem, pem) for pem in self.of(file.stem) if fingerprint(pem).startswith(start)]
        if len(found) != 1 or len(start) < 8:
            raise PdslError(
                f"{len(found)} pins begin with {start!r}; give at least 8 digits of one fingerprint,"
                f" as 'pdsl peer pin {self.folder.parent}' shows them"
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
def _parsed(content: bytes, name: str, file: Path) -> tuple[str, ...]:
    """The certificates of a pin file; a server asks for them at every call."""
    if not content.strip():
        return ()
    try:
        certificates = x509.load_pem_x509_certificates(content)
        pems = (certificate.public_bytes(serialization.Encoding.PEM).decode() for certificate in certificates)
        parsed = tuple(canonical(pem, name, str(file)) for pem in pems)
    except (ValueError, x509.InvalidVersion, PdslError) as e:
        raise DamagedPinsError(file, f"damaged, or not {name}'s") from e
    if len(parsed) > MOST:
        raise DamagedPinsError(file, f"{len(parsed)} certificates, of at most {MOST}")
    return parsed
