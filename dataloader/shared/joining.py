"""How a job comes into its group: it shows the key and a first batch, and comes again when its daemon was gone."""

import logging

import msgspec

from ...core.errors import NodeError
from ...core.paths import data_socket_path
from ...proto.share_frames import JoinShare, ShareJoined, ShareKey
from ..batch_maker import MadeBatch
from ..tensor_tree import encode_batch
from ..workers.pool import QuarantinedSample
from .feed import Feed
from .first_batch import leaf_digests
from .link import ShareLink, connect_or_start
from .share_arguments import GroupTerms
from .supply import Joined

logger = logging.getLogger(__name__)

FIRST_BATCH = 0
"""The number of the batch that each job prepares and shows."""


class Joining:
    """Joins one group for one feed, as often as need be."""

    def __init__(
        self, terms: GroupTerms, key: ShareKey, first: MadeBatch, *, helps_while_waiting: bool
    ) -> None:
        self._has_told = False
        self._frame = JoinShare(
            request_id=0,
            group=terms.group,
            key=key,
            first_batch=leaf_digests(first.data, first.left_out),
            first_batch_size_bytes=encode_batch(first.ids, first.data).size_bytes,
            budget_bytes=terms.budget_bytes,
            lease_s=terms.lease_s,
            position=0,
            jobs=terms.jobs,
            gather_s=terms.gather_s,
            helps_while_waiting=helps_while_waiting,
        )

    def join(self, feed: Feed, position: int) -> None:
        """Let the feed share from batch `position` on, if there is a daemon or one can be started; else say so once.

        Raises:
            UsageError: this job's batches are others than the group's.
        """
        try:
            joined = self._enter(connect_or_start(), position)
        except NodeError as error:  # also of a daemon that answered and then ended
            if not self._has_told:
                group = self._frame.group
                logger.warning("share_alone group=%s: %s; this job prepares for itself", group, error)
            self._has_told = True
            feed.look_later(self.again)
        else:
            feed.use(joined, self.again)

    def again(self, position: int) -> Joined | None:
        """Return a connection that takes part from batch `position` on; None where no daemon answers now.

        Raises:
            UsageError: this job's batches are others than the group's.
        """
        try:
            return self._enter(ShareLink(data_socket_path()), position)
        except NodeError as error:
            logger.debug("share_not_found_again reason=%s", error)
            return None

    def _enter(self, link: ShareLink, position: int) -> Joined:
        try:
            reply, _ = link.ask(
                lambda number: msgspec.structs.replace(self._frame, request_id=number, position=position)
            )
            assert isinstance(reply, ShareJoined), reply
        except BaseException:
            link.close()
            raise
        logger.info("share_joined group=%s jobs=%d", self._frame.group, reply.jobs)
        self._frame = msgspec.structs.replace(
            self._frame, jobs=1, gather_s=0.0
        )  # who comes again waits for nobody
        return link, [QuarantinedSample(*each) for each in reply.quarantined]
