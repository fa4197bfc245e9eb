"""What a client sees of tokens and quotas, as values, and from the API's messages."""

from dataclasses import dataclass

from ...proto import node_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """A token for another tool, without what makes it valid."""

    token_id: str
    name: str
    role: str
    owner_uid: int
    left_s: float
    """It is valid for so long from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedToken:
    """A new token."""

    token: str
    info: TokenView

    def __repr__(self) -> str:
        """Keep the token out of logs and tracebacks."""
        return f"IssuedToken({self.info.token_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """One bound of a user."""

    name: str
    """With its unit."""
    used: int
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserQuotas:
    """All bounds of a user."""

    uid: int
    bounded: tuple[QuotaView, ...]
    refused_count: int


def token_from_message(message: pb.TokenInfo) -> TokenView:
    """Return the view of a message."""
    return TokenView(
        token_id=message.token_id,
        name=message.name,
        role=message.role,
        owner_uid=message.owner_uid,
        left_s=message.left_s,
    )


def issued_from_message(message: pb.IssueTokenResponse) -> IssuedToken:
    """Return the view of a message."""
    return IssuedToken(token=message.token, info=token_from_message(message.info))


def quotas_from_message(message: pb.GetQuotasResponse) -> list[UserQuotas]:
    """Return the views of a message."""
    return [
        UserQuotas(
            uid=user.uid,
            bounded=tuple(
                QuotaView(name=each.name, used=each.used, bound=each.bound) for each in user.quotas
            ),
            refused_count=user.refused_count,
        )
        for user in message.users
    ]
