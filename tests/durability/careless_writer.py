"""The writing process of the power-cut test, but what it says is durable was never synced: the test must find that."""

from pathlib import Path

import power_cut_writer

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import SegmentHandle


def no_sync_data(self: RealStorage, handle: SegmentHandle) -> None:
    """Leave the data where they are."""


def no_sync_directory(self: RealStorage, path: Path) -> None:
    """Leave the names where they are."""


if __name__ == "__main__":
    RealStorage.sync_data = no_sync_data
    RealStorage.sync_directory = no_sync_directory
    power_cut_writer.main()
