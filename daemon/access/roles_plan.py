"""What each call of the control API asks of its caller: one table, held complete by a test. Pure."""

from dataclasses import dataclass
from enum import Enum, IntEnum


class Role(IntEnum):
    """What a caller may do; each may do what those before it may."""

    VIEWER = 1
    """Look."""
    OPERATOR = 2
    """Change runs, checkpoints and caches that it sees, and make the drives work."""
    ADMIN = 3
    """Change what concerns everybody: devices, the daemon itself."""

    @property
    def word(self) -> str:
        """The role as configuration and messages have it."""
        return self.name.lower()


class Proof(Enum):
    """How a caller has shown who it is."""

    CONNECTION = "connection"
    """A token bound to a living connection of the data socket, whose other end the kernel named."""
    TOKEN = "token"  # noqa: S105  how somebody is known
    """A token for other tools, with an end."""
    CERTIFICATE = "certificate"
    """A certificate, over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls."""

    uid: int
    """Whose runs it sees; 0: everybody's."""
    role: Role
    proof: Proof
    name: str
    """For the log: `uid 1000`, or the certificate's name."""

    @property
    def seen_uid(self) -> int | None:
        """Whose runs it sees; None: everybody's."""
        return self.uid or None


def local_role(uid: int, daemon_uid: int) -> Role:
    """Return what a user of this node may do: root and the daemon's own user everything, others what is theirs."""
    return Role.ADMIN if uid in (0, daemon_uid) else Role.OPERATOR


def role_for(method: str) -> Role:
    """Return what a method asks for, by its bare name; one that the table lacks is for administrators only."""
    return ROLES.get(method, Role.ADMIN)


def bare_name(path: str) -> str:
    """Return `GetStatus` of `/everstep.node.v1.Node/GetStatus`."""
    return path.rpartition("/")[2]


ROLES: dict[str, Role] = {
    "GetStatus": Role.VIEWER,
    "ListCheckpoints": Role.VIEWER,
    "GetCheckpoint": Role.VIEWER,
    "VerifyCheckpoint": Role.OPERATOR,
    "RemoveCheckpoint": Role.OPERATOR,
    "RemoveRun": Role.OPERATOR,
    "TagCheckpoint": Role.OPERATOR,
    "UntagCheckpoint": Role.OPERATOR,
    "DropCache": Role.OPERATOR,
    "StartScrub": Role.OPERATOR,
    "InspectStores": Role.ADMIN,
    "ListDevices": Role.VIEWER,
    "DrainDevice": Role.ADMIN,
    "RetireDevice": Role.ADMIN,
    "ReadmitDevice": Role.ADMIN,
    "Shutdown": Role.ADMIN,
    "WatchEvents": Role.VIEWER,
    "GetController": Role.VIEWER,
    "SetBudget": Role.OPERATOR,
    "ForceCheckpoint": Role.OPERATOR,
    "PauseCheckpoints": Role.OPERATOR,
    "ResumeCheckpoints": Role.OPERATOR,
    "ListRuns": Role.VIEWER,
    "GetRun": Role.VIEWER,
    "ListSlots": Role.VIEWER,
    "PinCheckpoint": Role.OPERATOR,
    "UnpinCheckpoint": Role.OPERATOR,
    "ExportCheckpoint": Role.OPERATOR,
    "ListCaches": Role.VIEWER,
    "ListMembers": Role.VIEWER,
    "ListGroups": Role.VIEWER,
    "Drain": Role.ADMIN,
    "ReloadConfig": Role.ADMIN,
    "OpenWebSession": Role.VIEWER,
    # who may call, and how much (this folder)
    "IssueToken": Role.VIEWER,
    "ListTokens": Role.VIEWER,
    "RevokeToken": Role.OPERATOR,
    "GetQuotas": Role.VIEWER,
}
