"""Trust store: the certificates that a peer accepts, by neighbour.

A neighbour has one pinned certificate, or two while it replaces its key. They are in `pins/<name>.pem`. Removing a
certificate from that file revokes it at once. Nothing else makes a certificate trusted: no authority and no name.
"""

import errno
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdsl.peer.identity import PeerInfo, canonical_certificate, fingerprint
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file, write_whole

MAX_PINS = 2  # per neighbour: the current certificate and the next one


class DamagedPinsError(PdslError):
    """A pin file is unusable, so no certificate of that neighbour is accepted."""

    def __init__(self, file: Path, reason: str):
        super().__init__(
            f"{file}: {reason}; replace it with the neighbour's card: pdsl peer pin {file.parent.parent} CARD"
        )


@dataclass(frozen=True)
class TrustStore:
    """Pinned certificates in a folder `pins/`."""

    folder: Path
    _read: dict[str, tuple[tuple[int, int, int], tuple[str, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )  # name → identity of the file when it was last read, and its certificates

    def accepted(self, name: str) -> tuple[str, ...]:
        """Pinned certificates of a neighbour, for a running peer: empty if the file is damaged or cannot be read now.

        The file is read again only after a change, so a process without free file descriptors keeps its pins.
        """
        try:
            found = self._file(name).stat()
            version = found.st_ino, found.st_size, found.st_mtime_ns
            if self._read.get(name, (None,))[0] != version:
                self._read[name] = version, tuple(self.certificates(name))
        except (OSError, PdslError):
            return ()
        return self._read[name][1]

    def certificates(self, name: str) -> list[str]:
        """Pinned certificates of a neighbour, as PEM; empty after revocation."""
        file = self._file(name)
        try:
            return list(_parse(read_file(file), name, file))
        except FileNotFoundError:
            return []
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                raise PdslError(f"{file}: {e.strerror}; close some files or raise the limit (ulimit -n)") from e
            raise DamagedPinsError(file, e.strerror or "cannot be read") from e

    def add(self, card: PeerInfo) -> bool:
        """Pin a card's certificate in addition to an existing one. Returns whether a damaged file was replaced.

        With two pins already, one must be revoked first, because no pin is removed silently. A damaged file is replaced
        by this certificate alone.
        """
        try:
            pems = self.certificates(card.name)
        except DamagedPinsError:
            self._write(card.name, [card.certificate])
            return True
        if card.certificate in pems:
            return False
        if len(pems) == MAX_PINS:
            raise PdslError(
                f"{card.name} already has {MAX_PINS} pins; remove one first: pdsl peer pin FOLDER --revoke"
                f" {fingerprint(pems[0])[:16]}"
            )
        self._write(card.name, [*pems, card.certificate])
        return False

    def revoke(self, prefix: str) -> PeerInfo:
        """Remove the pin whose fingerprint starts with `prefix`. Returns its owner, with an empty address."""
        found: list[tuple[str, str]] = []
        for file in sorted(self.folder.glob("*.pem")):
            with suppress(DamagedPinsError):  # it accepts no certificate, and must not block other revocations
                pems = self.certificates(file.stem)
                found += [(file.stem, pem) for pem in pems if fingerprint(pem).startswith(prefix)]
        if len(found) != 1 or len(prefix) < 8:
            raise PdslError(
                f"{len(found)} pins start with {prefix!r}; give at least 8 digits of one fingerprint;"
                f" 'pdsl peer pin {self.folder.parent}' lists them"
            )
        ((name, pem),) = found
        self._write(name, [other for other in self.certificates(name) if other != pem])
        return PeerInfo(name, "", pem)

    def discard(self, card: PeerInfo) -> None:
        """Remove the pin of a card's certificate, if there is one."""
        with suppress(DamagedPinsError):  # it accepts no certificate
            pems = self.certificates(card.name)
            if card.certificate in pems:
                self._write(card.name, [pem for pem in pems if pem != card.certificate])

    def _write(self, name: str, pems: list[str]) -> None:
        self.folder.mkdir(exist_ok=True)
        write_whole(self._file(name), "".join(pems).encode())

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.pem"


@lru_cache(maxsize=1024)
def _parse(content: bytes, name: str, file: Path) -> tuple[str, ...]:
    """Parse the certificates of a pin file."""
    if not content.strip():
        return ()
    try:
        certificates = x509.load_pem_x509_certificates(content)
        pems = (certificate.public_bytes(serialization.Encoding.PEM).decode() for certificate in certificates)
        parsed = tuple(canonical_certificate(pem, name, str(file)) for pem in pems)
    except (ValueError, x509.InvalidVersion, PdslError) as e:
        raise DamagedPinsError(file, f"damaged, or not a certificate of {name}") from e
    if len(parsed) > MAX_PINS:
        raise DamagedPinsError(file, f"{len(parsed)} certificates, but at most {MAX_PINS} are allowed")
    return parsed
