"""Puts the fault proxy behind https, with a certificate that no authority has signed."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.fault_server import FaultProxy


def serve_https(proxy: FaultProxy, folder: Path) -> str:
    """Let `proxy` speak https from now on and return its URL; the certificate is in `folder`/certificate.pem."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(write_certificate(folder))
    proxy.socket = context.wrap_socket(proxy.socket, server_side=True, do_handshake_on_connect=False)
    return proxy.endpoint_url.replace("http:", "https:")


def write_certificate(folder: Path) -> Path:
    """Write a self-signed certificate for 127.0.0.1, and its key, into one file; return its path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "storage")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "certificate.pem"
    path.write_bytes(private + certificate.public_bytes(encoding))
    return path
