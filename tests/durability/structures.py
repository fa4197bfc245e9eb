"""Structures that no write makes, whose checksums are right where somebody could have made them so; of step 2."""

import re
import shutil
from collections.abc import Callable

from corruptions import Places, replace_segment, resign, rewrite_manifests, swap

from everstep.core.ids import random_id


def swap_checkpoints(places: Places) -> None:
    swap(places.segment(0, 1), places.segment(0, 2))


def swap_devices(places: Places) -> None:
    swap(places.segment(0, 2), places.segment(1, 2))


def old_segment_under_the_new_name(places: Places) -> None:
    shutil.copy(places.segment(0, 1), places.segment(0, 2))


def hard_link_to_another_segment(places: Places) -> None:
    old, new = places.segment(0, 1), places.segment(0, 2)
    new.unlink()
    new.hardlink_to(old)


def old_manifest_under_the_new_name(places: Places) -> None:
    for device in (0, 1):
        shutil.copy(places.manifest(device, 1), places.manifest(device, 2))


def hard_link_to_another_manifest(places: Places) -> None:
    for device in (0, 1):
        new = places.manifest(device, 2)
        new.unlink()
        new.hardlink_to(places.manifest(device, 1))


def another_stamp(field: str, value: str) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        content = places.segment(0, 2).read_bytes()
        pattern = rf'"{field}":"[0-9a-z-]+"'.encode()
        new = f'"{field}":"{value}"'.encode()
        replace_segment(places, 0, 2, re.sub(pattern, new, content, count=1))

    return change


def another_header(old: bytes, new: bytes) -> Callable[[Places], None]:
    """Change the header's text, with a manifest that has the changed file's checksum; its size stays."""

    def change(places: Places) -> None:
        for device in (0, 1):
            content = places.segment(device, 2).read_bytes()
            size = int.from_bytes(content[:8], "little")
            text, count = re.subn(old, new, content[8 : 8 + size].rstrip(), count=1)
            if count and len(text) <= size:
                replace_segment(places, device, 2, content[:8] + text.ljust(size) + content[8 + size :])
                return
        raise AssertionError("nothing was changed")

    return change


def another_manifest(old: bytes, new: bytes) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        def substitute(content: bytes) -> bytes:
            changed, count = re.subn(old, new, content[56:], count=1)
            assert count
            return content[:56] + changed

        rewrite_manifests(places, 2, substitute)

    return change


def nested_values(places: Places) -> None:
    rewrite_manifests(
        places, 2, lambda content: content.replace(b'{"epoch":1}', b"[" * 100_000 + b"]" * 100_000)
    )


def manifest_without_end(places: Places) -> None:
    rewrite_manifests(places, 2, lambda content: content + b" " * 1_000 + content[56:])


def manifests_that_differ(places: Places) -> None:
    path = places.manifest(1, 2)
    path.write_bytes(resign(path.read_bytes().replace(b'{"epoch":1}', b'{"epoch":2}')))


STRANGE_ID = random_id().encode()
STRUCTURES: dict[str, Callable[[Places], None]] = {
    "segments of two checkpoints swapped": swap_checkpoints,
    "segments of two devices swapped": swap_devices,
    "old segment under the new name": old_segment_under_the_new_name,
    "hard link to another segment": hard_link_to_another_segment,
    "old manifest under the new name": old_manifest_under_the_new_name,
    "hard link to another manifest": hard_link_to_another_manifest,
    "manifests differ": manifests_that_differ,
    "stamp of another generation": another_stamp("generation", "f" * 32),
    "stamp of another run": another_stamp("run_id", "f" * 32),
    "stamp of another attempt": another_stamp("attempt", f"{2:020d}"),
    "stamp of another step": another_stamp("step", f"{3:020d}"),
    "stamp of another rank": another_stamp("rank", f"{1:020d}"),
    "stamp of another segment": another_stamp("segment", f"{9:020d}"),
    "stamp beyond 63 bits": another_stamp("step", "9" * 20),
    "newer segment format": another_stamp("format", "everstep-segment-v2"),
    "entries overlap": another_header(rb'"data_offsets":\[([1-9]\d*),', rb'"data_offsets":[0,'),
    "entries leave a hole": another_header(rb'"data_offsets":\[0,', rb'"data_offsets":[8,'),
    "entry ends before it begins": another_header(rb'"data_offsets":\[0,\d+\]', rb'"data_offsets":[0,-1]'),
    "entry of an unknown dtype": another_header(rb'"dtype":"\w+"', rb'"dtype":"Q9"'),
    "entry of another shape": another_header(rb'"shape":\[\d+', rb'"shape":[1'),
    "entry of an absurd shape": another_header(rb'"shape":\[', rb'"shape":[9223372036854775807,'),
    "entry of another name": another_header(rb'\},"(\w)', rb'},"_\1'),
    "header is no JSON": another_header(rb"\}\}$", rb"}]"),
    "header is nested": another_header(rb"\}\}$", rb"}," + b'"x":' + b"[" * 2000),
    "no segments": another_manifest(rb'"segments":\[.*\],"values"', rb'"segments":[],"values"'),
    "segment of an unknown device": another_manifest(
        rb'("segments":\[\{"segment":\d+,"device_id":)"\w+"', rb'\1"' + STRANGE_ID + rb'"'
    ),
    "segment of another size": another_manifest(rb'"file_size":\d+', rb'"file_size":4097'),
    "segment of an absurd size": another_manifest(rb'"file_size":\d+', rb'"file_size":9223372036854775807'),
    "no checksums": another_manifest(rb'"xxh3":"\w+"', rb'"xxh3":""'),
    "more checksums": another_manifest(rb'"xxh3":"', rb'"xxh3":"0123456789abcdef'),
    "segment of another generation": another_manifest(
        rb'("segments":\[\{"segment":\d+,"device_id":"\w+","generation":)"\w+"', rb'\1"' + STRANGE_ID + rb'"'
    ),
    "world of nobody": another_manifest(rb'"world_size":\d+', rb'"world_size":0'),
    "another rank": another_manifest(rb'"rank":0', rb'"rank":1'),
    "another run": another_manifest(rb'"run_name":"demo"', rb'"run_name":"other"'),
    "a piece twice": another_manifest(rb'"pieces":\[(\{[^}]+\})', rb'"pieces":[\1,\1'),
    "a piece of nothing": another_manifest(rb'"key":"', rb'"key":"_'),
    "a leaf twice": another_manifest(rb'"name":"model.half"', rb'"name":"model.weight"'),
    "nested values": nested_values,
    "two payloads": manifest_without_end,
}

SPOILS_BOTH = ("segments of two checkpoints swapped",)
"""The others leave checkpoint 1.1 as it is."""
