"""Whether a store that is opened after a crash keeps every promise: by metadata alone, and byte for byte."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from crash_plan import Image, Step
from model_storage import Fault, ModelStorage, Recorder, place_of
from promises import ALARM, RUN_ID, RUN_NAME, Promise, Shard, Witness, digest, manifest_copies

from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import DAMAGED_NAME, FLOOR_NAME, TAGS_NAME, RunStore
from everstep.checkpoint.scrub_mark import SCRUB_NAME
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.store_format import (
    DiskId,
    Tag,
    decode_attempt,
    decode_damage,
    decode_disk_id,
    decode_floor,
    decode_scrub_mark,
    decode_tag,
)
from everstep.checkpoint.testing import HOLDER, load
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import DataError, EverstepError, NotFoundError
from everstep.core.ids import CheckpointId

RUN_PARTS = ("runs", str(HOLDER.uid), RUN_ID)
_KEPT = re.compile(r"commits/[0-9].*|damaged\.json|data/[0-9a-f]{32}(/.*)?|tags/[0-9a-f].*")


@dataclass(slots=True)
class Recovered:
    """A finished recovery: what it did, what it offers, what it left."""

    trace: list[Step]
    image: Image
    shards: frozenset[Shard]
    """Those that are offered or would be, but for a fresh start."""
    lost: frozenset[Shard]
    """Those with a part on a retired device."""
    out: frozenset[int]
    """Devices that are no members."""
    attempt: int
    floor: CheckpointId | None
    tags: frozenset[tuple[str, CheckpointId]]
    damaged: frozenset[Shard]
    """Those that reading has shown to be damaged."""
    violations: list[str]


@dataclass(slots=True)
class Checker:
    """Checks the crash states of one workload; remembers what it has seen, so that equal states cost nothing."""

    device_count: int
    witness: Witness
    _right: set[int] = field(default_factory=set[int])
    """Shards whose bytes were read through the product and found right: (shard, manifest, segments) as one number."""
    _stable: set[int] = field(default_factory=set[int])
    """Recovered images that a second recovery leaves as they are."""

    def check(self, image: Image, promise: Promise, recorder: Recorder | None = None) -> Recovered:
        """Open the store on these disks as a restarted daemon does, and compare with what was promised.

        `recorder`: the trace goes on from there (the daemon alone had died, and what it wrote is in memory).
        """
        storage = ModelStorage(self.device_count, image, recorder)
        violations: list[str] = []
        found: set[Shard] = set()
        attempt, floor, tags = 0, None, dict[str, CheckpointId]()
        lost: set[Shard] = set()
        damaged: set[Shard] = set()
        out: frozenset[int] = promise.out
        begun = len(storage.recorder.trace)
        try:
            if recorder is None:
                violations += self._copies(storage, promise)
            before = {number: dict(storage.files_below(number)) for number in promise.out}
            with _opened(storage) as store:
                violations += [f"missing: {store.missing}"] if store.missing else []
                out = self._out(storage, store)
                members = [number for number in range(self.device_count) if number not in out]
                violations += self._membership(storage, store, promise, out)
                known_floor = max(self._floors(storage, members), default=None)
                report = recover(store)
                violations += [f"quarantined: {report.problems}"] if report.quarantined_count else []
                run = _run(store)
                if run is not None:
                    lost = shards_on(run, store.membership.retired.keys())
                    found = _shards(run) - lost
                    attempt, floor = run.highest_attempt(), run.complete_floor()
                    tags = run.tags()
                    damaged = _marked(run)
                    if floor != known_floor:
                        violations.append(f"the floor is {floor}, a device knew {known_floor}")
                    violations += self._catalogue(storage, run, promise, lost)
                elif promise.must or promise.attempt:
                    violations.append("the run is gone")
                violations += self._leftovers(storage, run, members)
            violations += [
                f"retired device {number} was changed"
                for number in out & before.keys()
                if dict(storage.files_below(number)) != before[number]
            ]
        except EverstepError as exc:
            violations.append(f"cannot be opened: {type(exc).__name__}: {exc}")
        result = Recovered(
            trace=storage.recorder.trace[begun:],
            image=storage.image,
            shards=frozenset(found),
            lost=frozenset(lost),
            out=out,
            attempt=attempt,
            floor=floor,
            tags=frozenset(tags.items()),
            damaged=frozenset(damaged),
            violations=violations,
        )
        if not violations:
            violations += self._again(storage, result)
        return result

    # --- who belongs to the store ---------------------------------------------------------------------------------

    def _out(self, storage: ModelStorage, store: Store) -> frozenset[int]:
        inside = {place_of(device.path)[0] for device in store.devices}
        return frozenset(range(len(storage.roots))) - inside

    def _membership(
        self, storage: ModelStorage, store: Store, promise: Promise, out: frozenset[int]
    ) -> Iterator[str]:
        """Yield who should be a member and is not, or the other way round, and copies that differ."""
        if not promise.out <= out <= promise.out | promise.maybe_out:
            yield f"devices {sorted(out)} are no members, promised {sorted(promise.out)}"
        for device in store.devices:
            number, state = place_of(device.path)[0], store.device_state(device.device_id)[0]
            if number in promise.draining and state is not DeviceState.DRAINING:
                yield f"device {number} is {state.value}, promised draining"
            wanted = store.membership.disk_id(device.device_id, store_id=store.store_id)
            if _disk_id(storage, number) != wanted:
                yield f"device {number} does not say who belongs to the store"

    # --- before anybody mends anything ----------------------------------------------------------------------------

    def _copies(self, storage: ModelStorage, promise: Promise) -> Iterator[str]:
        """Yield what has fewer durable copies than were promised; recovery would hide it."""
        staying = promise.staying(self.device_count)
        for shard, copies in promise.must:
            count = self.witness.copy_count(storage, shard, staying)
            if count < copies:
                yield f"{_named(shard)} has {count} whole manifests, {copies} were acknowledged"
        yield from self._copies_of_membership(storage, promise, staying)
        told = [device for device in staying if device not in promise.behind]
        for device in told:
            for attempt in range(1, promise.attempt + 1):
                content = storage.content_at(device, *RUN_PARTS, "attempts", str(attempt))
                if not content or decode_attempt(content, "").attempt != attempt:
                    yield f"attempt {attempt} is not on device {device}"
        for tag in promise.tags:
            if self._tag_copies(storage, *tag, staying) != [tag] * len(staying):
                yield f"tag {tag} is not on every device"
        yield from self._scrub_marks(storage, promise, staying)
        yield from self._damage_marks(storage, promise, staying)
        floors = self._floors(storage, told)
        if promise.floor is not None and (len(floors) < len(told) or min(floors) < promise.floor):
            yield f"the floor {promise.floor} is not on every device: {floors}"

    def _tag_copies(
        self, storage: ModelStorage, name: str, checkpoint: CheckpointId, devices: Sequence[int]
    ) -> list[tuple[str, CheckpointId]]:
        """Return what each of these devices that has the tag's file says."""
        file_name = Tag(name=name, checkpoint=checkpoint).file_name
        found = (storage.content_at(device, *RUN_PARTS, TAGS_NAME, file_name) for device in devices)
        tags = [decode_tag(content, file_name, file_name) for content in found if content is not None]
        return [(tag.name, tag.checkpoint) for tag in tags]

    def _scrub_marks(self, storage: ModelStorage, promise: Promise, staying: Sequence[int]) -> Iterator[str]:
        """Yield which device does not say how far the scrub is: whole as it was once kept, no older and no newer."""
        for device in staying:
            content = storage.content_at(device, SCRUB_NAME)
            count = 0 if content is None else decode_scrub_mark(content, SCRUB_NAME).checkpoint_count
            if not promise.scrub <= count <= promise.scrub_max:
                yield f"device {device} says {count} are scrubbed, promised {promise.scrub} to {promise.scrub_max}"

    def _damage_marks(self, storage: ModelStorage, promise: Promise, staying: Sequence[int]) -> Iterator[str]:
        """Yield that fewer devices know what is damaged than were promised; each copy is whole as it was once kept."""
        there, count = promise.shards(), 0
        for device in staying:
            content = storage.content_at(device, *RUN_PARTS, DAMAGED_NAME)
            shards = () if content is None else decode_damage(content, DAMAGED_NAME).shards
            said = {(each.checkpoint, each.rank) for each in shards} & there
            count += promise.damaged & there <= said <= promise.damaged | promise.damaged_may
        if count < promise.damage_copies:
            yield f"{count} devices know what is damaged, promised {promise.damage_copies}"

    def _copies_of_membership(
        self, storage: ModelStorage, promise: Promise, staying: Sequence[int]
    ) -> Iterator[str]:
        """Yield which member does not know who has left or drains; before one says retired, all say draining."""
        ids = {number: _disk_id(storage, number) for number in range(self.device_count)}
        copies = {number: own for number in staying if (own := ids[number]) is not None}
        left = {subject.device_id for number in promise.out if (subject := ids[number]) is not None}
        drains = {subject.device_id for number in promise.draining if (subject := ids[number]) is not None}
        drains |= {each for own in copies.values() for each in own.retired}
        for number, own in copies.items():
            if not left <= own.retired.keys():
                yield f"device {number} does not know who was retired"
            if not drains <= own.draining | own.retired.keys():
                yield f"device {number} does not know who drains, or has left according to another"

    def _floors(self, storage: ModelStorage, devices: Sequence[int]) -> list[CheckpointId]:
        """Return the floor of each of these devices that has one; CorruptDataError when it is not whole."""
        found = (storage.content_at(device, *RUN_PARTS, FLOOR_NAME) for device in devices)
        return [decode_floor(content, "floor.json").newest for content in found if content is not None]

    # --- after a recovery -----------------------------------------------------------------------------------------

    def _catalogue(
        self, storage: ModelStorage, run: RunStore, promise: Promise, lost: set[Shard]
    ) -> Iterator[str]:
        found = _shards(run)
        yield from (f"LOST {_named(shard)}" for shard in (promise.shards() | promise.losing) - found)
        expected = promise.shards() | promise.may | promise.losing | promise.lost
        yield from (f"CAME BACK {_named(shard)}" for shard in found - expected)
        yield from (f"LOST TOO {_named(shard)}" for shard in lost & promise.shards())
        if not promise.attempt <= run.highest_attempt() <= promise.attempt_max:
            yield f"attempt {run.highest_attempt()}, promised {promise.attempt} to {promise.attempt_max}"
        if not promise.fresh <= run.fresh_floor() <= promise.fresh_max:
            yield f"fresh from {run.fresh_floor()}, promised {promise.fresh} to {promise.fresh_max}"
        tags = set(run.tags().items())
        yield from (f"LOST tag {tag}" for tag in promise.tags - tags)
        yield from (f"CAME BACK tag {tag}" for tag in tags - promise.tags - promise.tags_may)
        floor = run.complete_floor()
        if floor is not None and (promise.floor_max is None or floor > promise.floor_max):
            yield f"the floor is {floor}, nobody said more than {promise.floor_max}"
        marked = _marked(run)
        yield from (f"damage of {_named(shard)} is forgotten" for shard in promise.damaged & (found - marked))
        alarms = marked - promise.damaged - promise.damaged_may
        yield from (f"{_named(shard)} is taken for damaged" for shard in alarms)
        offered = set(run.offered())
        for info in run.checkpoints():
            is_marked = any((info.checkpoint, rank) in marked for rank in info.ranks)
            problems = [problem for problem in info.problems if ALARM not in problem]
            if any((info.checkpoint, rank) in lost for rank in info.ranks):
                if info.is_offered or not any("(retired)" in problem for problem in info.problems):
                    yield f"{info.checkpoint} is offered without a device that was retired: {info.problems}"
            elif problems:
                yield f"HALF {info.checkpoint}: {problems}"
            elif (info.checkpoint in offered) != (
                info.checkpoint.attempt >= run.fresh_floor() and not is_marked
            ):
                yield f"{info.checkpoint} is offered wrongly"
        for shard in sorted(found):
            yield from self._bytes(storage, run, shard)

    def _bytes(self, storage: ModelStorage, run: RunStore, shard: Shard) -> Iterator[str]:
        """Read a shard through the product's own reader and verifier, once for each content that it may have."""
        record = run.shard(*shard)
        if record.problem:
            return
        segments = tuple(storage.content(run.segment_path(ref)) for ref in record.segments)
        key = hash((shard, record.manifest_sha256, segments))
        if key in self._right:
            return
        try:
            read = load(run, run.manifest(*shard))
        except DataError as exc:
            yield f"MIXED {_named(shard)}: {exc}"
            return
        wrong = [leaf for leaf, content in self.witness.content[shard].items() if read[leaf] != content]
        if wrong:
            yield f"MIXED {_named(shard)}: {wrong} are not what was saved"
        elif any(checkpoint == shard[0] for checkpoint, _ in _marked(run)):
            return  # verifying would take the mark back
        elif not verify_checkpoint(run, shard[0]).is_intact:
            yield f"{_named(shard)} does not verify"
        else:
            self._right.add(key)

    def _leftovers(
        self, storage: ModelStorage, run: RunStore | None, members: Sequence[int]
    ) -> Iterator[str]:
        """Yield what a recovery should have removed or made whole."""
        floors = self._floors(storage, members)
        if floors and (len(floors) < len(members) or len(set(floors)) != 1):
            yield f"the floors differ after recovery: {floors}"
        used = _generations(run) if run else set[tuple[int, str]]()
        for device in members:
            for generation, content in storage.files_below(device, *RUN_PARTS, "data"):
                if content is None and "/" not in generation and (device, generation) not in used:
                    yield f"ORPHAN {generation} on device {device}"
            yield from self._files_of_a_crash(storage, device, is_run_known=run is not None)
        present = {shard[0] for shard in _shards(run)} if run else set[CheckpointId]()
        for tag in run.tags().items() if run else ():
            if self._tag_copies(storage, *tag, members) != [tag] * len(members):
                yield f"tag {tag} is not on every device after recovery"
            if tag[1] not in present:
                yield f"tag {tag} is on a checkpoint that is not there"
        for shard in _shards(run) if run else ():
            copies = manifest_copies(storage, shard, members)
            if len(copies) != len(members) or len(set(copies)) != 1:
                yield f"{_named(shard)} has {len(copies)} manifests after recovery"

    def _files_of_a_crash(self, storage: ModelStorage, device: int, *, is_run_known: bool) -> Iterator[str]:
        for path, content in storage.files_below(device):
            name = path.rsplit("/", 1)[-1]
            if path.startswith("pool/") and content is not None:
                yield f"{path} still waits on device {device} to be written again"
            # One may stay in a run that was never made: nobody can say whose it is.
            if name.startswith(".tmp.") and (is_run_known or name == path):
                yield f"unfinished file {path} on device {device}"

    def _again(self, storage: ModelStorage, first: Recovered) -> Iterator[str]:
        """Recover once more, and open for reading only: nothing may change, and all is offered again."""
        key = storage.image.key(storage.roots)
        if key in self._stable:
            return
        for read_only in (False, True):
            again = ModelStorage(self.device_count, storage.image)
            with _opened(again, read_only=read_only) as store:
                recover(store)
                run = _run(store)
                shards = frozenset(_shards(run) if run else ())
            if shards != first.shards | first.lost:
                yield f"a second recovery finds {len(shards)}, the first {len(first.shards)} (read-only: {read_only})"
            if again.image.key(again.roots) != key:
                yield f"a second recovery changes the store (read-only: {read_only})"
        self._stable.add(key)

    # --- without a device ---------------------------------------------------------------------------------------

    def without(self, image: Image, device: int, shards: Sequence[Shard]) -> list[str]:
        """Open the store while a device is absent that these shards were made independent of."""
        storage = ModelStorage(self.device_count, image)
        present = [path for index, path in enumerate(storage.directories) if index != device]
        try:
            with _opened(storage, present) as store:
                recover(store)
                run = store.run(HOLDER.uid, RUN_NAME)
                intact = {(each.checkpoint, each.rank) for each in run.shards() if not each.problem}
                violations = [
                    f"{_named(shard)} is not there without device {device}"
                    for shard in shards
                    if shard not in intact
                ]
                for shard in intact.intersection(shards):
                    violations += self._bytes(storage, run, shard)
        except EverstepError as exc:
            return [f"cannot be opened without device {device}: {exc}"]
        return violations

    # --- on a partial view ----------------------------------------------------------------------------------------

    def with_a_part(self, image: Image, fault: Fault | None, absent: int | None) -> tuple[Image, list[str]]:
        """Recover with a device that is not there or that cannot be read; return what that left.

        Nothing but temporary files may have been removed then.
        """
        storage = ModelStorage(self.device_count, image)
        before = _kept(storage)
        directories = [path for index, path in enumerate(storage.directories) if index != absent]
        storage.faults = [fault] if fault else []
        violations: list[str] = []
        is_partial = fault is not None or absent is not None
        try:
            with _opened(storage, directories) as store:
                # A retired device is no part, whether it is there, readable, or not.
                members = {device.path for device in store.devices}
                parts = [index for index, path in enumerate(storage.directories) if path in members]
                is_partial = bool(store.missing) or (fault is not None and fault.device in parts)
                recover(store)
        except EverstepError as exc:
            if fault is None and absent is None:
                violations.append(f"cannot be opened: {exc}")
        storage.faults = []
        gone = before - _kept(storage)
        if gone and is_partial and (fault is None or fault.was_hit):
            violations.append(f"removed on a partial view (absent {absent}, fault {fault}): {sorted(gone)}")
        return storage.image, violations


def _kept(storage: ModelStorage) -> set[tuple[int, str]]:
    return {
        (device, path)
        for device in range(len(storage.roots))
        for path, _ in storage.files_below(device, *RUN_PARTS)
        if _KEPT.fullmatch(path)
    }


def _opened(
    storage: ModelStorage, directories: Sequence[object] | None = None, *, read_only: bool = False
) -> Store:
    return open_store(
        storage.directories if directories is None else directories,  # pyright: ignore[reportArgumentType]
        ops=storage,
        holder=HOLDER,
        uid=HOLDER.uid,
        read_only=read_only,
    )


def _generations(run: RunStore) -> set[tuple[int, str]]:
    """Return the generations that shards refer to, by the number of their device."""
    devices = {device.device_id: place_of(device.path)[0] for device in run.store.devices}
    refs = [ref for shard in run.shards() for ref in shard.segments]
    return {(devices[ref.device_id], ref.generation) for ref in refs if ref.device_id in devices}


def _run(store: Store) -> RunStore | None:
    try:
        return store.run(HOLDER.uid, RUN_NAME)
    except NotFoundError:
        return None


def _shards(run: RunStore) -> set[Shard]:
    return {(record.checkpoint, record.rank) for record in run.shards()}


def _marked(run: RunStore) -> set[Shard]:
    """Return the shards of which reading has shown that they are damaged."""
    return {(record.checkpoint, record.rank) for record in run.shards() if record.bad_content}


def _disk_id(storage: ModelStorage, number: int) -> DiskId | None:
    content = storage.content_at(number, "disk.id")
    return None if content is None else decode_disk_id(content, "disk.id")


def shards_on(run: RunStore, device_ids: Collection[str]) -> set[Shard]:
    """Return the shards that have a part on one of these devices."""
    return {
        (record.checkpoint, record.rank)
        for record in run.shards()
        if any(ref.device_id in device_ids for ref in record.segments)
    }


def _named(shard: Shard) -> str:
    return f"rank {shard[1]} of {shard[0]}"


def image_text(storage: ModelStorage) -> str:
    """Return what stands on the devices, for a person who looks at a violation."""
    return "\n".join(
        f"  {device}/{path}" + ("/" if content is None else f" {len(content)} bytes {digest(content)}")
        for device in range(len(storage.roots))
        for path, content in sorted(storage.files_below(device), key=lambda entry: entry[0])
    )
