"""Signatures with an organisation's private key, checked with its certificate.

The signed bytes start with the purpose of the signature, so that none is valid for anything else.
"""

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pdsl.peer.identity import Identity


def sign(own: Identity, purpose: str, content: bytes) -> str:
    """Signature (hex) of some content with the organisation's key: ECDSA on P-256 with SHA-256."""
    key = serialization.load_pem_private_key(own.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.sign(_signed_bytes(purpose, content), ec.ECDSA(hashes.SHA256())).hex()


def is_signed(certificate: str, purpose: str, content: bytes, signature: str) -> bool:
    """Whether the signature of the content was made with the key of a certificate (PEM)."""
    key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # `canonical_certificate` has checked the certificate
    try:
        key.verify(bytes.fromhex(signature), _signed_bytes(purpose, content), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(purpose: str, content: bytes) -> bytes:
    return f"pdsl {purpose}\0".encode() + content
