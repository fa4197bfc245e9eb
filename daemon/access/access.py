"""Who calls the control API: a token on the Unix socket, a certificate over TCP; and whether it may."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..control.tokens import TokenBook
from .certificates import is_tls, names_of
from .roles_plan import Caller, Proof, Role, bare_name, role_for
from .section import ControlSection

BEARER = "Bearer "
TOKEN_CHARS_MAX = 128
"""Longer ones are not even hashed."""


class UnknownCallerError(Exception):
    """Nobody knows who calls; the text says what is missing."""


class NotAllowedError(Exception):
    """The caller is known, and may not do this; the text says why."""


class Access:
    """Owned by the event loop."""

    def __init__(self, section: ControlSection, tokens: TokenBook) -> None:
        self._tokens = tokens
        self._rules: dict[str, tuple[Role, int]] = {}
        self.use(section)

    def use(self, section: ControlSection) -> None:
        """Take a table of who may call over TCP; from the next call on it is the one that counts."""
        self._rules = {name: rule.rights() for name, rule in section.clients.items()}

    def caller(
        self,
        metadata: Sequence[tuple[str, str | bytes]],
        auth_context: Mapping[str, Any],
        peer: str,
    ) -> Caller:
        """Return who calls. Over TCP the certificate alone counts, whatever token comes with it.

        Raises:
            UnknownCallerError: it has shown nothing that holds.
        """
        if is_tls(auth_context):
            return self._by_certificate(names_of(auth_context))
        if not peer.startswith("unix:"):  # no such port is ever opened
            raise UnknownCallerError("calls over TCP need TLS")
        given = [value for key, value in metadata if key == "authorization"]
        token = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        holder = None
        if token.startswith(BEARER) and len(token) <= TOKEN_CHARS_MAX:
            holder = self._tokens.holder(token.removeprefix(BEARER))
        if holder is None:
            raise UnknownCallerError(
                "the metadata `authorization: Bearer <token>` is missing or its token is not valid (any more):"
                " the data socket gives one, valid while that connection lasts; `everstep token` one for other tools"
            )
        return holder

    def _by_certificate(self, names: Sequence[str]) -> Caller:
        found = [name for name in names if name in self._rules]
        if not found:
            raise UnknownCallerError("the certificate's name is not in this daemon's [control.clients]")
        # The table may name a certificate twice: what all its names allow is what it may.
        rights = [self._rules[name] for name in found]
        uids = {uid for _, uid in rights if uid}
        if len(uids) > 1:
            raise UnknownCallerError("the certificate's names belong to several users in [control.clients]")
        return Caller(
            uid=uids.pop() if uids else 0,
            role=min(role for role, _ in rights),
            proof=Proof.CERTIFICATE,
            name=found[0],
        )

    @staticmethod
    def check(caller: Caller, method: str) -> None:
        """Return where the caller may call a method, named as on the wire.

        Raises:
            NotAllowedError: it may not.
        """
        name = bare_name(method)
        needed = role_for(name)
        if caller.role >= needed:
            return
        # Said before anything is looked for: it is the same for runs that exist and that do not.
        owner = f"this daemon belongs to uid {os.getuid()}: " if caller.proof is Proof.CONNECTION else ""
        raise NotAllowedError(
            f"{owner}{name} needs the role {needed.word}, the caller has {caller.role.word}"
        )
