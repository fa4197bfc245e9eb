"""What is recorded: workloads as data. player.py runs them."""

from dataclasses import dataclass

from everstep.checkpoint.leaf import LeafSpec, whole_leaf

LEAVES = (whole_leaf("weight", "float32", (1000,)), whole_leaf("bias", "float32", (200,)))
FOUR_LEAVES = tuple(whole_leaf(f"weight.{number}", "float32", (100,)) for number in range(4))
"""One in each of four segments."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the next attempt."""

    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """A snapshot is written while it is copied, which its seal ends; until then it must not be there."""

    given_up_after: int | None = None
    """So many segments are copied, and then it is given up: it must never be there. None: it is sealed."""
    hashes_last: bool = False
    """Its segments are written before their checksums are taken; else the other way round."""


@dataclass(frozen=True, slots=True)
class Save:
    """Persist the shards of these ranks at a step; `copies` is the number of durable manifests, 0 for a failure."""

    step: int
    ranks: tuple[int, ...] = (0,)
    copies: int | None = None
    """None: one on each device."""
    is_unknown: bool = False
    """With copies=0: it may be there all the same."""
    is_recycled: bool | None = None
    """All of its segments, or none of them, are written over files of deleted ones."""
    extra: int = 0
    """So many elements more in the first leaf than the workload says."""
    overlap: Overlap | None = None
    """None: it was sealed before."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Say that all ranks have committed a step of this attempt."""

    step: int
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Collect garbage; exactly these checkpoints may go."""

    keep_last: int
    removes: tuple[tuple[int, int], ...] = ()
    fails: bool = False
    every_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove one checkpoint on request."""

    checkpoint: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Label:
    """Give a checkpoint a tag, or take it away."""

    name: str
    checkpoint: tuple[int, int]
    is_removed: bool = False
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Let a call of the next step fail."""

    call: str
    device: int | None = None
    part: str = ""
    nth: int = 1
    times: int = 1
    is_done: bool = False
    """It does its work first."""


@dataclass(frozen=True, slots=True)
class Lose:
    """A device counts as failed from here on, until the store is opened again."""

    device: int


@dataclass(frozen=True, slots=True)
class SaveAgain:
    """Persist the shards of a step again, so that they do without the devices that are lost."""

    step: int
    copies: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Reopen:
    """End the daemon, start it again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a device get no new segments."""

    device: int
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class Unplug:
    """Open the store without a device from the next Reopen on; `back` plugs it in again."""

    device: int
    back: bool = False


@dataclass(frozen=True, slots=True)
class Retire:
    """Take a device out of the store."""

    device: int
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Readmit:
    """Open the store again with a retired device taken back as a new one."""

    device: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Keep how far the scrub of the store is: so many checkpoints are read."""

    count: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """Reading a checkpoint of rank 0 shows that it is damaged, which is kept; or that every byte of it is right."""

    checkpoint: tuple[int, int]
    is_disproved: bool = False
    copies: int | None = None
    """So many devices take it. None: each."""


DeviceStep = Drain | Unplug | Retire | Readmit
StepOfRun = (
    Begin | Save | SaveAgain | Complete | Collect | Remove | Label | Lose | Scrub | Damage | DeviceStep
)
Step = StepOfRun | Break | Reopen


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What happens to a store."""

    name: str
    steps: tuple[Step, ...]
    device_count: int = 2
    world_size: int = 1
    from_birth: bool = False
    """The making of the store and of the run is recorded too."""
    leaves: tuple[LeafSpec, ...] = LEAVES
    segment_count: int | None = None
    """As many as fit the devices, unless given."""
    recycles: bool = False
    """Segments are written over files of deleted ones."""
    partial_views: bool = False
    """The store is also opened while a device is missing or cannot be read."""


_SAVES = (Begin(), Save(1), Complete(1), Save(2), Complete(2), Save(3), Complete(3))

WORKLOADS = (
    Workload(name="birth", steps=(Begin(), Save(1)), from_birth=True),
    Workload(
        name="two devices with collection",
        steps=(*_SAVES, Collect(1, removes=((1, 1),)), Save(4), Complete(4), Collect(1, removes=((1, 2),))),
    ),
    Workload(
        name="three devices",
        steps=(Begin(), Save(1), Save(2), Save(3), Complete(3), Collect(1, removes=((1, 1),))),
        device_count=3,
    ),
    Workload(
        name="two ranks with completion",
        steps=(
            Begin(),
            Save(1, (0, 1)),
            Complete(1),
            Save(2, (0,)),
            Save(3, (0, 1)),
            Complete(3),
            Complete(1),  # old news
            Save(4, (1,)),
            Collect(1, removes=((1, 2),)),
        ),
        world_size=2,
    ),
    Workload(
        name="an abandoned branch",
        steps=(*_SAVES, Reopen(), Begin(), Save(2), Complete(2), Collect(1, removes=((1, 1), (1, 2)))),
    ),
    Workload(name="a fresh start", steps=(*_SAVES[:5], Begin(fresh=True), Save(1), Complete(1), Save(2))),
    Workload(
        name="removal on request",
        steps=(*_SAVES, Remove((1, 2)), Save(4), Remove((1, 1))),
    ),
    Workload(
        name="tags and retention",
        steps=(
            *_SAVES,
            Label("best", (1, 1)),
            Collect(1),  # a tag, the floor and the one before it
            Save(4),
            Complete(4),
            Collect(1, every_steps=2),  # 1 in [0, 2), 2 in [2, 4), 4 in [4, 6); 3 before the floor
            Collect(1, removes=((1, 2),)),
            Label("best", (1, 1), is_removed=True),
            Label("kept", (1, 3)),
            Collect(1, removes=((1, 1),)),
        ),
    ),
    Workload(
        name="failed tags",
        steps=(
            *_SAVES,
            Break(call="write_small_new", device=0, part="/tags"),
            Label("best", (1, 1), fails=True),
            Reopen(),
            Break(call="sync_directory", device=0, part="/tags"),
            Label("late", (1, 2), fails=True),
            Label("late", (1, 2), fails=True),  # a failed sync is not repeated
            Reopen(),
            Label("late", (1, 2)),
            Break(call="unlink", device=0, part="/tags"),
            Label("late", (1, 2), is_removed=True, fails=True),
            Collect(1),  # a device is suspect
            Reopen(),
            Collect(1),
        ),
        partial_views=True,
    ),
    Workload(
        name="damage is found, and disproved",
        steps=(
            Begin(),
            Save(1),
            Save(2),
            Damage((1, 2)),
            Damage((1, 1)),
            Damage((1, 2), is_disproved=True),
            Reopen(),
            Save(3),
            Damage((1, 1), is_disproved=True),
        ),
        partial_views=True,
    ),
    Workload(
        name="damage and collection, and a device that misses some",
        steps=(
            *_SAVES,
            Damage((1, 2)),
            Collect(1, removes=((1, 2),)),  # the intact one before the floor stays
            Save(4),
            Complete(4),
            Break(call="replace", device=0, part="damaged.json"),
            Damage((1, 3), copies=1),
            Collect(1),  # a device is suspect
            Reopen(),
            Collect(1, removes=((1, 3),)),
            Damage((1, 4)),
        ),
    ),
    Workload(
        name="failed fdatasync",
        steps=(
            *_SAVES,
            Break(call="sync_data", device=1),
            Save(4, copies=1),  # on the other device
            Collect(1),  # a device is suspect
            Reopen(),
            Collect(1, removes=((1, 1),)),
            Save(5),
        ),
    ),
    Workload(
        name="failed write",
        steps=(
            Begin(),
            Save(1),
            Break(call="write_segment", device=0),
            Save(2, copies=1),
            Save(3, copies=1),
            Reopen(),
            Break(call="write_segment", times=2),
            Save(4, copies=0),
            Save(5),
        ),
    ),
    Workload(
        name="failed fsync of data directories",
        steps=(
            *_SAVES[:3],
            Break(call="sync_directory", device=0, part="/data"),
            Save(2, copies=1),
            Break(call="sync_directory", device=1, part="/data", nth=2),
            Save(3),  # both have failed now: on the first again, rather than nowhere
            Save(4),
        ),
    ),
    Workload(
        name="manifest on one device only",
        steps=(
            *_SAVES[:3],
            Break(call="rename_noreplace", device=1),
            Save(2, copies=1),
            Reopen(),
            Break(call="write_small_new", device=0, part="/commits"),
            Save(3, copies=1),
            Collect(1),
            Reopen(),
            Complete(3),
            Collect(1, removes=((1, 1),)),
        ),
        partial_views=True,
    ),
    Workload(
        name="failed fsync of commits",
        steps=(
            *_SAVES[:3],
            Break(call="sync_directory", device=0, part="/commits"),
            Save(2, copies=1),
            Reopen(),
            Break(call="sync_directory", part="/commits", times=2),
            Save(3, copies=0, is_unknown=True),
            Save(4),
        ),
    ),
    Workload(
        name="renames that were done and failed",
        steps=(
            *_SAVES[:3],
            Break(call="rename_noreplace", device=1, is_done=True),
            Save(2, copies=1),
            Reopen(),
            Break(call="rename_noreplace", times=2, is_done=True),
            Save(3, copies=0, is_unknown=True),
            Break(call="replace", device=1, is_done=True),
            Complete(2, fails=True),
            Save(4),
            Reopen(),
            Save(5),
        ),
    ),
    Workload(
        name="failed manifests",
        steps=(
            Begin(),
            Save(1),
            Break(call="write_small_new", part="/commits", times=2),
            Save(2, copies=0),
            Save(3),
        ),
    ),
    Workload(
        name="failed collection",
        steps=(
            *_SAVES,
            Break(call="sync_directory", device=1, part="/commits"),
            Collect(1, removes=((1, 1),), fails=True),
            Collect(1),
            Reopen(),
            Save(4),
            Complete(4),
        ),
    ),
    Workload(
        name="failed completion",
        steps=(
            *_SAVES[:4],
            Break(call="replace", times=2),
            Complete(2, fails=True),
            Save(3),
            Reopen(),
            Complete(3),
        ),
    ),
    Workload(
        name="a device that fails at a completion and at a beginning",
        steps=(
            *_SAVES[:4],
            Break(call="replace", device=0),
            Complete(2),
            Save(3, copies=1),
            Reopen(),
            Break(call="write_small_new", device=1, part="/attempts"),
            Begin(),
            Save(1, copies=1),
            Reopen(),
            Complete(1),
        ),
    ),
    Workload(
        name="a device missing",
        steps=(Begin(), Save(1), Save(2), Complete(2), Break(call="sync_data", device=0), Save(3, copies=1)),
        partial_views=True,
    ),
    Workload(
        name="written while copied",
        steps=(
            Begin(),
            Save(1, overlap=Overlap()),
            Complete(1),
            Save(2, overlap=Overlap(hashes_last=True)),
            Complete(2),
            Collect(1),  # the floor and the one before it
            Save(3, overlap=Overlap(given_up_after=4)),  # at the seal
            Save(4, overlap=Overlap(given_up_after=2, hashes_last=True)),
            Break(call="write_segment", device=1),
            Save(5, copies=1, overlap=Overlap(hashes_last=True)),  # on the other device, from the same slot
            Reopen(),
            Complete(5),
            Collect(1, removes=((1, 1),)),
        ),
        leaves=FOUR_LEAVES,
        segment_count=4,
    ),
    Workload(
        name="written while copied, over files written again",
        steps=(
            *_SAVES,
            Collect(1, removes=((1, 1),)),
            Save(4, overlap=Overlap(given_up_after=1, hashes_last=True)),
            Save(5, overlap=Overlap(given_up_after=2)),
            Complete(3),
            Collect(1),
            Save(6, overlap=Overlap(hashes_last=True)),
            Break(call="sync_data", device=0),
            Save(7, copies=1, overlap=Overlap()),
            Reopen(),
            Complete(7),
            Collect(1, removes=((1, 2), (1, 3))),
            Save(8, overlap=Overlap()),
        ),
        recycles=True,
    ),
    Workload(
        name="a segment taken over",
        # Made one after the other, the first device has run out while two segments wait for the second.
        steps=(*_SAVES[:5], Break(call="write_segment", device=1), Save(3, copies=1), Reopen(), Save(4)),
        leaves=FOUR_LEAVES,
        segment_count=4,
    ),
    Workload(
        name="one of three devices fails",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Break(call="sync_data", device=1),
            Save(2, copies=2),
            Save(3, copies=2),
            Reopen(),
            Complete(3),
            Save(4),
            Collect(1, removes=((1, 1),)),
        ),
        device_count=3,
    ),
    Workload(
        name="a device lost after the commit",
        steps=(
            *_SAVES[:5],
            Lose(1),
            SaveAgain(2, copies=1),
            Save(3, copies=1),
            Reopen(),
            Complete(3),
            Collect(1, removes=((1, 1),)),
            Lose(0),
            SaveAgain(3, copies=1),
        ),
    ),
    Workload(
        name="two devices lost one after the other",
        steps=(
            Begin(),
            Save(1),
            Save(2, (0, 1)),
            Lose(2),
            SaveAgain(2, copies=2, ranks=(0, 1)),
            Lose(0),
            SaveAgain(2, copies=1, ranks=(0, 1)),
            Reopen(),
            Save(3),
            Remove((1, 2)),
        ),
        device_count=3,
        world_size=2,
    ),
    Workload(
        name="a device drains",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Collect(1, removes=((1, 1),)),
            Drain(1, cancel=True),
            Save(4),
        ),
    ),
    Workload(
        name="a drained device is retired, and readmitted",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(2),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Retire(2),
            Collect(1, removes=((1, 1),)),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Readmit(2),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 3),)),
        ),
        device_count=3,
        partial_views=True,
    ),
    Workload(
        name="a device is retired while it has what is newest",
        steps=(
            Begin(),
            Drain(1),
            Save(1),
            Complete(1),
            Drain(1, cancel=True),
            Save(2),
            Complete(2),
            Save(3),
            Complete(3),
            Retire(1),
            Collect(1, removes=((1, 2),)),
            Reopen(),
            Begin(),
            Save(4),
            Complete(4),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 1), (1, 3))),
        ),
        partial_views=True,
    ),
    Workload(
        name="a missing device is retired, and returns",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Save(2),
            Complete(2),
            Unplug(1),
            Reopen(),
            Save(3),
            Complete(3),
            Collect(1),  # a device is missing
            Retire(1),
            Collect(1, removes=((1, 1),)),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Unplug(1, back=True),
            Reopen(),
            Begin(),
            Save(5),
        ),
    ),
    Workload(
        name="the last device that is well stays",
        steps=(
            Begin(),
            Save(1),
            Complete(1),
            Drain(1),
            Break(call="rename_noreplace", device=0),
            Save(2, copies=1),
            Reopen(),
            Break(call="rename_noreplace", device=0, part="/commits"),
            Save(3, copies=1),
            Retire(1, fails=True),
            Reopen(),
            Retire(1),
            Save(4),
        ),
    ),
    Workload(
        name="a failed retirement",
        steps=(
            *_SAVES[:5],
            Break(call="replace", device=0, part="disk.id"),
            Retire(1, fails=True),
            Collect(1),
            Reopen(),
            Break(call="replace", device=0, part="disk.id", nth=2),
            Retire(1, fails=True),
            Collect(1),
            Reopen(),
            Begin(),
            Save(1),
            Complete(1),
            Collect(1, removes=((1, 1),)),
        ),
    ),
    Workload(
        name="a retirement that reached one of two",
        steps=(
            *_SAVES[:5],
            Break(call="replace", device=0, part="disk.id", nth=2),
            Retire(2, fails=True),
            Collect(1),  # not every member knows
            Save(3, copies=1),
            Reopen(),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 1), (1, 2))),
        ),
        device_count=3,
        partial_views=True,
    ),
    Workload(
        name="files written again",
        steps=(
            *_SAVES,
            Collect(1, removes=((1, 1),)),
            Save(4, is_recycled=True, extra=30),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Save(5, is_recycled=True, extra=-30),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Reopen(),
            Save(6, is_recycled=False),
        ),
        recycles=True,
    ),
    Workload(
        name="files written again, and failures",
        steps=(
            *_SAVES,
            Break(call="recycle", device=0),
            Collect(1, removes=((1, 1),)),  # one waits, the other one is unlinked
            Break(call="open_recycled", device=1),
            Save(4, is_recycled=False),
            Complete(4),
            Break(call="recycle", device=0, is_done=True),
            Collect(1, removes=((1, 2),)),
            Break(call="open_recycled", device=1, is_done=True),
            Save(5, is_recycled=False),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Break(call="write_segment", device=1),
            Save(6, copies=1),
            Reopen(),
            Complete(6),
            Break(call="sync_directory", device=1, part="/commits"),
            Collect(1, removes=((1, 4),), fails=True),
            Save(7, copies=1, is_recycled=False),  # what was not removed for sure is not written over
            Reopen(),
            Complete(7),
        ),
        recycles=True,
    ),
    Workload(
        name="a scrub beside retention and files written again",
        steps=(
            *_SAVES,
            Scrub(1),
            Label("best", (1, 2)),
            Collect(1, removes=((1, 1),)),
            Scrub(2),
            Save(4, is_recycled=True),
            Complete(4),
            Collect(1),  # a tag, the floor and the one before it
            Save(5),
            Complete(5),
            Scrub(3),
            Collect(1, every_steps=4, removes=((1, 3),)),
            Save(6, is_recycled=True),
            Scrub(4, ends=True),
            Reopen(),
            Complete(6),
            Scrub(5),
            Label("best", (1, 2), is_removed=True),
            Collect(1, removes=((1, 2), (1, 4))),
            Save(7, is_recycled=True),
            Scrub(6),
        ),
        recycles=True,
    ),
    Workload(
        name="a device that drains and leaves has files to write again",
        steps=(
            *_SAVES,
            Collect(1, removes=((1, 1),)),
            Drain(1),
            Save(4),
            Complete(4),
            Collect(1, removes=((1, 2),)),
            Save(5),
            Complete(5),
            Collect(1, removes=((1, 3),)),
            Retire(1),
            Save(6, copies=1),
            Readmit(1),
            Save(7),
        ),
        recycles=True,
    ),
)
