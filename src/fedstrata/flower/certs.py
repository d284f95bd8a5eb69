"""Certificates and keys for a Flower deployment: who the server is, and which sites may take part.

ca.crt                  the authority that all sites trust; its key is not kept, for it signs nothing more
server.crt, server.key  the SuperLink's
node-N.key, node-N.pub  a SuperNode's: the key stays at its site, the public part is registered at the SuperLink
.gitignore              keeps all of them out of a repository
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.core.extras import missing
from fedstrata.errors import UsageError
from fedstrata.runs.files import disk_errors

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE | re.ASCII)


def check_cryptography() -> None:
    """Refuse early where keys cannot be made."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise missing("cryptography", "certificates need") from None


def write_certs(directory: Path, hosts: Sequence[str], nodes: int, days: int) -> list[Path]:
    """Write an authority, a server's certificate for loopback and these hosts, and key pairs; the files' paths.

    Raises:
        UsageError: if something exists there: keys are never overwritten.
    """
    check_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec

    names = [_name(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate(authority, None, days, ())
    signed = _certificate(server, (authority, root), days, names)
    files = {
        "ca.crt": _pem(root),
        "server.key": _private(server),
        "server.crt": _pem(signed),
    }
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{number}.key"], files[f"node-{number}.pub"] = _private(key, ssh=True), _public(key)
    with disk_errors(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} exists and is not empty: keys are never overwritten")
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        (directory / ".gitignore").write_text(
            "# Private keys: nothing of this directory belongs into a repository.\n*\n"
        )
        for name, data in files.items():
            handle = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
    return [directory / name for name in files]


def _name(host: str) -> x509.GeneralName:
    """A host as certificates name it: an address, or the name of one machine (RFC 1123)."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    # A name that ends in a number would be read as an address.
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
        shown = host if len(host) <= 100 else host[:100] + "…"
        raise UsageError(f"'{shown}' is not a host: give a name such as server.example.org, or an address")
    return x509.DNSName(host)


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    signer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None,
    days: int,
    names: Sequence[x509.GeneralName],
) -> x509.Certificate:
    """A certificate of a key: the authority's own without a signer, else a server's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink" if signer else "fedstrata federation")])
    issuer = who if signer is None else signer[1].subject
    signing = key if signer is None else signer[0]
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=0 if signer is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False)
        .add_extension(_usage(signer is None), True)
    )
    if signer is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return builder.sign(signing, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey, ssh: bool = False) -> bytes:
    """A key as TLS reads it; or in the form of OpenSSH, which is the one that Flower reads of a SuperNode."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8, NoEncryption())


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key, in the form of OpenSSH too."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
