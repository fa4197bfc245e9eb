"""What the metrics port shows to callers beyond the node, and what it asks of them; read again when files change."""

import hmac
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError
from ..access.token_file import read_shared_token
from .section import MetricsSection

logger = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class Credentials:
    """The files of `[metrics]`. Used by the web server's thread only."""

    def __init__(self, section: MetricsSection) -> None:
        """Read what is named.

        Raises:
            ConfigError: a file cannot be read, or does not hold what it should.
        """
        self._section = section
        self._stamp: _Stamp | None = None
        self._context: ssl.SSLContext | None = None
        self.context()
        if section.token_file:
            self._token()

    def context(self) -> ssl.SSLContext | None:
        """Return what the next connection is served with; None: without TLS.

        Files that have changed are read again. While they do not fit each other, the ones before go on.
        """
        section = self._section
        if not section.has_tls:
            return None
        stamp = _stamp_of([section.certificate_file, section.key_file, section.authority_file])
        if self._context is None or (stamp is not None and stamp != self._stamp):
            try:
                self._context, self._stamp = _context(section), stamp
            except ConfigError as error:
                if self._context is None:
                    raise
                logger.error("web_credentials_unusable reason=%s", error)
        return self._context

    def token_holds(self, given: str) -> bool:
        """Tell whether it is what the token's file says now; compared in constant time. Without the file nothing is."""
        if not self._section.token_file:
            return False
        try:
            token = self._token()
        except ConfigError as error:
            logger.error("web_credentials_unusable reason=%s", error)
            return False
        return hmac.compare_digest(token.encode(), given.encode(errors="surrogateescape"))

    def _token(self) -> str:
        return read_shared_token(Path(self._section.token_file), "metrics.token_file")


def _stamp_of(names: Sequence[str]) -> _Stamp | None:
    """Return what changes when one of the files does; None: one is not there now."""
    try:
        found = [Path(name).stat() for name in names if name]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _context(section: MetricsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(section.certificate_file, section.key_file)
        if section.authority_file:
            context.load_verify_locations(section.authority_file)
            context.verify_mode = (
                ssl.CERT_OPTIONAL
            )  # probes and people have none: each path asks for what it needs
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"metrics: the certificate {section.certificate_file}, its key {section.key_file} or the authority"
            f" {section.authority_file or '(none)'} cannot be used: {error.strerror or error}",
            hint="PEM files that this user can read, the key without a passphrase",
        ) from error
    return context
