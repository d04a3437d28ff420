"""Certificates for tests of TLS: the packaged Valkey has none, so the proxy before it ends it."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any


def issuer(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """An authority and its certificate for 127.0.0.1: files of authority, certificate, the latter's key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = dt.datetime.now(dt.UTC)

    def signed(subject: str, public: Any, key: Any, number: int, *extensions: Any) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]),
            public_key=public,
            serial_number=number,
            not_valid_before=now - dt.timedelta(days=1),
            not_valid_after=now + dt.timedelta(days=1),
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    authority = x509.BasicConstraints(ca=True, path_length=None)
    files = folder / f"{name}.ca", folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(signed(name, root.public_key(), root, 1, authority))
    files[1].write_bytes(signed("node", leaf.public_key(), root, 2, x509.SubjectAlternativeName([address])))
    files[2].write_bytes(
        leaf.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files
