"""Which cache a call between nodes is about. Protobuf stays here, in the client and in the service."""

from dataclasses import dataclass

from ...proto import peer_pb2 as pb
from ...proto.frames import CacheContent

FINGERPRINT_CHARS_MAX = 128
UID_MAX = (1 << 32) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetKey:
    """A dataset of a user: the same on all nodes."""

    uid: int
    content: CacheContent
    fingerprint: str
    sample_count: int

    def to_message(self) -> pb.Dataset:
        """Return it for the wire."""
        return pb.Dataset(
            uid=self.uid,
            content=self.content.value,
            fingerprint=self.fingerprint,
            sample_count=self.sample_count,
        )

    @staticmethod
    def from_message(message: pb.Dataset) -> "DatasetKey":
        """Return what a peer means.

        Raises:
            ValueError: it is no dataset.
        """
        if not 1 <= len(message.fingerprint) <= FINGERPRINT_CHARS_MAX or message.uid > UID_MAX:
            raise ValueError("a fingerprint or a user that cannot be")
        return DatasetKey(
            uid=message.uid,
            content=CacheContent(message.content),
            fingerprint=message.fingerprint,
            sample_count=message.sample_count,
        )
