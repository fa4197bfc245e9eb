"""TLS of the control API: 1.3 only, certificates on both sides, read again when their files change."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import grpc

from ...core.errors import ConfigError
from .section import ControlSection

logger = logging.getLogger(__name__)

TLS_TYPE = b"ssl"


class Certificates:
    """What this daemon shows, and whom it believes. Called by threads of gRPC, one at a time for each handshake."""

    def __init__(self, section: ControlSection) -> None:
        """Read the files.

        Raises:
            ConfigError: one cannot be read, or is no PEM.
        """
        self._paths = {
            "control.key_file": Path(section.key_file),
            "control.certificate_file": Path(section.certificate_file),
            "control.authority_file": Path(section.authority_file),
        }
        self._stamp: tuple[tuple[int, int, int], ...] = self._look()
        self._configuration = self._read()
        self._said = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that follow the files."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            cast(Any, self._newer),  # which may return None; its types do not know that
            require_client_authentication=True,
        )

    def _newer(self) -> "grpc.ServerCertificateConfiguration | None":
        """Return what the files hold now; None: they have not changed, or cannot be used."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            configuration = self._read()
        except ConfigError as error:
            if str(error) != self._said:  # each handshake asks again, until they are mended
                self._said = str(error)
                logger.warning("certificates_not_read %s", error)
            return None
        self._stamp, self._configuration, self._said = stamp, configuration, ""
        logger.info("certificates_read_again")
        return configuration

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when a file does: its inode, time and length."""
        found: list[tuple[int, int, int]] = []
        for key, path in self._paths.items():
            try:
                status = path.stat()
            except OSError as error:
                raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _read(self) -> "grpc.ServerCertificateConfiguration":
        contents: dict[str, bytes] = {}
        for key, path in self._paths.items():
            wanted = b"PRIVATE KEY-----" if key == "control.key_file" else b"-----BEGIN CERTIFICATE-----"
            try:
                contents[key] = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
            if wanted not in contents[key]:
                raise ConfigError(f"{key}: {path} is no PEM of what it should hold")
        _check_private(self._paths["control.key_file"])
        pair = (contents["control.key_file"], contents["control.certificate_file"])
        return grpc.ssl_server_certificate_configuration([pair], contents["control.authority_file"])


def names_of(auth_context: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the certificate of a call over TLS: alternative names, else the common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = [bytes(each).decode(errors="replace") for each in cast(Any, auth_context.get(key) or ())]
        if found:
            return tuple(found)
    return ()


def is_tls(auth_context: Mapping[str, Any]) -> bool:
    """Tell whether a call came over TLS."""
    return [bytes(each) for each in cast(Any, auth_context.get("transport_security_type") or ())] == [
        TLS_TYPE
    ]


def _check_private(path: Path) -> None:
    """Raise ConfigError where others may read a key."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"control.key_file: others may read {path} (mode {mode:o})", hint=f"chmod 600 {path}"
        )
