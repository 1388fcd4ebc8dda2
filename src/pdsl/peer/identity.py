"""Identity of an organisation: a private key, a self-signed certificate that the peers pin, and a card to send them.

A certificate cannot sign other certificates and never expires. A peer is trusted because its certificate is pinned, and
only as long as it is pinned.
"""

import datetime
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdsl.utils.errors import PdslError
from pdsl.utils.files import PRIVATE, read_file, read_private, write_whole
from pdsl.utils.types import JsonDict

# Files in an organisation's folder
KEY, CERTIFICATE, CARD = "key.pem", "certificate.pem", "card.toml"
PLAN, PINS, RUN, CHARGE_MARKER, AMENDMENTS = "plan.toml", "pins", "run", "charged", "amendments"
DATA, PUBLIC, WEIGHTS = "data.npz", "public.npz", "weights.safetensors"

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ADDRESS = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]{2,45}\]):([0-9]{1,5})")
NO_ADDRESS = "none"  # of an organisation that calls its neighbours and cannot be called
VALIDITY = (datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59))  # independent of any clock
MAX_PEM = 4000  # characters of a certificate
MAX_TOML = {"card": 20_000, "plan": 1_000_000, "signed amendment": 300_000}  # bytes
MAX_LINES = 20_000  # of a card, a plan or an amendment
MAX_DOTS = 10  # in a line: a parser needs memory in proportion to the square of a dotted key
X509_ERRORS = (
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def read_toml(path: Path, kind: str) -> JsonDict:
    """Read an untrusted TOML file, a `kind` such as "card"."""
    try:
        content = read_file(path, MAX_TOML[kind] + 1)
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; give the path of a {kind}") from e
    return parse_toml(content, str(path), kind)


def parse_toml(content: bytes, where: str, kind: str) -> JsonDict:
    """Parse untrusted TOML of bounded size and depth; PdslError if it is invalid."""
    if len(content) > MAX_TOML[kind]:
        raise PdslError(f"{where}: larger than {MAX_TOML[kind]:,} bytes, so not a {kind}; request the file again")
    lines = content.splitlines()
    if len(lines) > MAX_LINES or any(line.count(b".") > MAX_DOTS for line in lines):
        raise PdslError(f"{where}: too many lines, or dots in a line, so not a {kind}; request the file again")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as e:
        reason = " ".join(str(e).split())[:200]
        raise PdslError(f"{where}: not a {kind} ({reason}); request the file again") from e


@dataclass(frozen=True)
class PeerInfo:
    """Public description of an organisation, stored in `card.toml`."""

    name: str
    address: str  # host:port on which it listens, or NO_ADDRESS
    certificate: str  # PEM

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_dict(), multiline_strings=True)

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "address": self.address, "certificate": self.certificate}

    @classmethod
    def read(cls, path: Path) -> "PeerInfo":
        return cls.from_values(read_toml(path, "card"), str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> "PeerInfo":
        return cls.from_values(parse_toml(content, where, "card"), where)

    @classmethod
    def from_values(cls, values: object, where: str) -> "PeerInfo":
        """Validate an untrusted card; PdslError if any part of it is invalid."""
        if not isinstance(values, dict) or set(values) != {"name", "address", "certificate"}:
            raise PdslError(f"{where}: a card has exactly name, address and certificate; request the card again")
        for key, value in values.items():
            if not isinstance(value, str):
                raise PdslError(f"{where}: {key} is not text; request the card again")
        name, address = values["name"], values["address"]
        check_name(name, where)
        check_address(address, where)
        return cls(name, address, canonical_certificate(values["certificate"], name, where))


def check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise PdslError(
            f"{where}: invalid name {name!r:.60}; choose another: at most 40 characters of a-z, 0-9 and inner '-'"
        )


def check_address(address: str, where: str) -> None:
    if address == NO_ADDRESS:
        return
    match = ADDRESS.fullmatch(address)
    if not match or not 0 < int(match[1]) < 65536:
        raise PdslError(f"{where}: address {address!r:.80} is not host:port, like peer.example.org:7443, or none")


def canonical_certificate(pem: str, name: str, where: str) -> str:
    """Return a certificate for `name` in canonical PEM, the form in which certificates are compared.

    Guarantee: the certificate is self-signed, names only `name`, has a P-256 key and cannot sign other certificates.
    Trusting it therefore means trusting the holder of that one key.
    """
    try:
        if len(pem) > MAX_PEM:
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
        raise PdslError(f"{where}: invalid certificate of {name}: {reason}; request the card again") from e
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint(pem: str) -> str:
    """SHA-256 of a certificate in DER form, as hex."""
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True)
class Identity:
    """An organisation with its folder, its card and its private key."""

    folder: Path
    card: PeerInfo
    key: bytes = field(repr=False)  # PEM

    @classmethod
    def create(cls, folder: Path, name: str, address: str) -> "Identity":
        """Create a key and a certificate in a folder with mode 0700. A folder that has a key is refused."""
        if (folder / KEY).exists():
            raise PdslError(f"{folder} already has a key; choose another folder, or replace the key with --renew")
        return cls._generate(folder, name, address)

    @classmethod
    def renew(cls, folder: Path, name: str | None = None, address: str | None = None) -> "Identity":
        """Replace key and certificate, for instance after loss, damage or disclosure.

        Name and address are read from the card. They are arguments only if the card cannot be read.
        """
        _check_permissions(folder)
        try:
            card = PeerInfo.read(folder / CARD)
        except PdslError as e:
            if name is None or address is None:
                raise PdslError(
                    f"{folder / CARD} is missing or damaged, so name and address are unknown; give them:"
                    f" pdsl peer init {folder} --renew --name NAME --address HOST:PORT"
                ) from e
            return cls._generate(folder, name, address)
        if name is not None or address is not None:
            raise PdslError("--renew keeps name and address; omit --name and --address")
        return cls._generate(folder, card.name, card.address)

    @classmethod
    def _generate(cls, folder: Path, name: str, address: str) -> "Identity":
        check_name(name, "--name")
        check_address(address, "--address")
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        # TLS looks up trust anchors by subject, and two certificates of one name may be pinned: the serial number in
        # the subject keeps them apart.
        own = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.SERIAL_NUMBER, f"{serial:x}")]
        )
        certificate = (
            x509.CertificateBuilder(own, own, key.public_key(), serial, *VALIDITY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        card = PeerInfo(name, address, certificate.public_bytes(serialization.Encoding.PEM).decode())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            write_whole(folder / CERTIFICATE, card.certificate.encode())
            write_whole(folder / CARD, card.to_toml().encode())
            write_whole(folder / KEY, pem, PRIVATE)  # last: a new folder with a key is complete
        except OSError as e:
            raise PdslError(f"cannot write to {folder}: {e.strerror}; fix that, or choose another folder") from e
        return cls(folder, card, pem)

    @classmethod
    def load(cls, folder: Path) -> "Identity":
        """Load the organisation of a folder.

        PdslError if other users can read the folder or the key, or if the key does not match the card.
        """
        _check_permissions(folder)
        advice = f"restore it from a backup, or create a new one: pdsl peer init {folder} --renew"
        try:
            card = PeerInfo.read(folder / CARD)
        except PdslError as e:
            raise PdslError(f"{folder / CARD} is missing or damaged; {advice} --name NAME --address HOST:PORT") from e
        key = read_private(folder / KEY, advice)
        try:
            public = serialization.load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:
            raise PdslError(f"{folder / KEY} is damaged; {advice}") from e
        if public != x509.load_pem_x509_certificate(card.certificate.encode()).public_key():
            raise PdslError(f"{folder / KEY} does not match {folder / CARD}; {advice}")
        return cls(folder, card, key)


def _check_permissions(folder: Path) -> None:
    if not folder.is_dir():
        raise PdslError(f"no folder {folder}; create it with: pdsl peer init {folder}")
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise PdslError(f"{folder} is open to other users (mode {mode:04o}); run: chmod 700 {folder}")
