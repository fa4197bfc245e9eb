"""What the product's decoders of small files have returned, by content: thousands of recoveries read the same files.

A decoder is pure (its module's name ends with `_format`) and what it returns is frozen, so that a recovery cannot tell.
An error is not kept.
"""

import functools
import sys
from collections.abc import Generator
from contextlib import contextmanager

from everstep.checkpoint import manifest_format, segment_format, store_format

KEPT_MAX = 4096
"""Contents for each decoder; a workload has some hundreds."""

DECODERS = (
    manifest_format.decode_manifest_head,
    segment_format.read_stamp,
    store_format.decode_attempt,
    store_format.decode_damage,
    store_format.decode_disk_id,
    store_format.decode_floor,
    store_format.decode_run,
    store_format.decode_tag,
)


@contextmanager
def remembered() -> Generator[None]:
    """Let every module of the product decode each content once."""
    kept = {decode: functools.lru_cache(KEPT_MAX)(decode) for decode in DECODERS}
    places = [
        (module, decode)
        for name, module in sorted(sys.modules.items())
        if name.startswith("everstep.checkpoint.")
        for decode in DECODERS
        if getattr(module, decode.__name__, None) is decode
    ]
    for module, decode in places:
        setattr(module, decode.__name__, kept[decode])
    try:
        yield
    finally:
        for module, decode in places:
            setattr(module, decode.__name__, decode)
