"""Who an organisation is: a key that never leaves its folder, a certificate that everybody pins, a card to send.

A certificate is signed by its own key and by nobody else, may sign nothing, and has no date on which it ends: a peer is
who it is by being pinned, and stops being it when the pin is removed.
"""

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdsl.errors import PdslError
from pdsl.files import PRIVATE, read_private, write_whole
from pdsl.peer.files import parse_toml, read_toml

KEY, CERTIFICATE, CARD = "key.pem", "certificate.pem", "card.toml"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]{2,45}\]):([0-9]{1,5})")
ALWAYS = (datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59))  # no clock can end an identity
MOST_PEM = 4000
X509_ERRORS = (
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Card:
    """What an organisation tells the others about itself; nothing in it is secret."""

    name: str
    address: str  # host:port at which it listens
    certificate: str  # PEM

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_dict(), multiline_strings=True)

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "address": self.address, "certificate": self.certificate}

    @classmethod
    def read(cls, path: Path) -> "Card":
        return cls.checked(read_toml(path, "card"), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Card":
        return cls.checked(parse_toml(content, where, "card"), where)

    @classmethod
    def checked(cls, values: Any, where: str) -> "Card":
        """A card from outside, every part of it checked; PdslError if it is not one."""
        if not isinstance(values, dict) or set(values) != {"name", "address", "certificate"}:
            raise PdslError(f"{where}: a card has name, address and certificate, and nothing else; ask for it again")
        for key, value in values.items():
            if not isinstance(value, str):
                raise PdslError(f"{where}: {key} is not text; ask for the card again")
        name, address = values["name"], values["address"]
        check_name(name, where)
        check_address(address, where)
        return cls(name, address, canonical(values["certificate"], name, where))


def check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise PdslError(f"{where}: name {name!r:.60} is not of a-z, 0-9 and inner '-', at most 40; choose another")


def check_address(address: str, where: str) -> None:
    match = ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[1]) < 65536:
        raise PdslError(f"{where}: address {address!r:.80} is not host:port, like peer.example.org:7443")


def canonical(pem: str, name: str, where: str) -> str:
    """The certificate in the one form in which it is compared, if it is what `init` makes for `name`.

    Guarantee: signed by its own key, for this name alone, on the curve P-256, and not able to sign another certificate:
    whoever trusts it trusts the holder of that one key.
    """
    try:
        if len(pem) > MOST_PEM:
            raise ValueError("too long")
        certificates = x509.load_pem_x509_certificates(pem.encode())
        if len(certificates) != 1:
            raise ValueError("not exactly one certificate")
        (certificate,) = certificates
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
            raise ValueError("its key is not on the curve P-256")
        certificate.verify_directly_issued_by(certificate)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        if constraints.ca:
            raise ValueError("it may sign other certificates")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if list(names) != [x509.DNSName(name)]:
            raise ValueError(f"it is not for the name {name}")
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, *X509_ERRORS) as e:
        reason = " ".join(str(e).split())[:120] or type(e).__name__
        raise PdslError(f"{where}: the certificate of {name} is refused: {reason}; ask for the card again") from e
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint(pem: str) -> str:
    """SHA-256 of the certificate itself."""
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True)
class Identity:
    """An organisation in its own folder."""

    folder: Path
    card: Card
    key: bytes = field(repr=False)  # PEM

    @classmethod
    def create(cls, folder: Path, name: str, address: str) -> "Identity":
        """A new key and certificate in a folder that nobody else can look into. Refuses a folder that has a key."""
        if (folder / KEY).exists():
            raise PdslError(f"{folder} has a key already; give another folder, or renew it with --renew")
        return cls._made(folder, name, address)

    @classmethod
    def renew(cls, folder: Path, name: str | None = None, address: str | None = None) -> "Identity":
        """A new key and certificate in the place of the old ones, be they lost, damaged or known to others.

        Name and address stay as the card has them; they are to be given only where it cannot be read.
        """
        _check_closed(folder)
        try:
            card = Card.read(folder / CARD)
        except PdslError as e:
            if name is None or address is None:
                raise PdslError(
                    f"{folder / CARD} is missing or damaged, so name and address are not known; say them:"
                    f" pdsl peer init {folder} --renew --name NAME --address HOST:PORT"
                ) from e
            return cls._made(folder, name, address)
        if name is not None or address is not None:
            raise PdslError("--renew keeps name and address; leave them out")
        return cls._made(folder, card.name, card.address)

    @classmethod
    def _made(cls, folder: Path, name: str, address: str) -> "Identity":
        check_name(name, "--name")
        check_address(address, "--address")
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        # With the number in it, a name has one certificate: TLS looks for an anchor by its name, and two may be pinned.
        own = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.SERIAL_NUMBER, f"{serial:x}")]
        )
        certificate = (
            x509.CertificateBuilder(own, own, key.public_key(), serial, *ALWAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        card = Card(name, address, certificate.public_bytes(serialization.Encoding.PEM).decode())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            write_whole(folder / CERTIFICATE, card.certificate.encode())
            write_whole(folder / CARD, card.to_toml().encode())
            write_whole(folder / KEY, pem, PRIVATE)  # last: a new folder that has it has the rest
        except OSError as e:
            raise PdslError(f"cannot write to {folder}: {e.strerror}; mend it, or give another folder") from e
        return cls(folder, card, pem)

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """The organisation of this folder. Refuses a folder or key that others can read, or a key of another card."""
        _check_closed(folder)
        advice = f"restore it from a copy, or make a new one: pdsl peer init {folder} --renew"
        try:
            card = Card.read(folder / CARD)
        except PdslError as e:
            raise PdslError(f"{folder / CARD} is missing or damaged; {advice} --name NAME --address HOST:PORT") from e
        key = read_private(folder / KEY, advice)
        try:
            public = serialization.load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:
            raise PdslError(f"{folder / KEY} is damaged; {advice}") from e
        if public != x509.load_pem_x509_certificate(card.certificate.encode()).public_key():
            raise PdslError(f"{folder / KEY} and {folder / CARD} do not belong together; {advice}")
        return cls(folder, card, key)


def _check_closed(folder: Path) -> None:
    if not folder.is_dir():
        raise PdslError(f"there is no folder {folder}; 'pdsl peer init {folder}' makes one")
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise PdslError(f"{folder} is open to others (mode {mode:04o}); chmod 700 {folder}")
