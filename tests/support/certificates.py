"""Certificates for tests, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key; PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}.pem"
        _openssl(
            folder, "req", "-x509", "-newkey", *CURVE, "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.pem",
        )  # fmt: skip

    def sign(self, name: str, *alternatives: str, days: int = 2) -> Pair:
        """Return a certificate with the common name `name` and these alternative names (`DNS:…`, `URI:…`)."""
        more = ["-addext", f"subjectAltName={','.join(alternatives)}"] if alternatives else []
        stem = name.replace("/", "_")
        _openssl(
            self.folder, "req", "-newkey", *CURVE, "-nodes", "-subj", f"/CN={name}",
            "-keyout", f"{stem}.key", "-out", f"{stem}.csr", *more,
        )  # fmt: skip
        _openssl(
            self.folder, "x509", "-req", "-in", f"{stem}.csr", "-CA", f"{self.name}.pem", "-CAkey",
            f"{self.name}.key", "-days", str(days), "-copy_extensions", "copyall", "-out", f"{stem}.pem",
        )  # fmt: skip
        key = self.folder / f"{stem}.key"
        key.chmod(0o600)
        return Pair(self.folder / f"{stem}.pem", key)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
