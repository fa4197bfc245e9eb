"""Recovering one run: its attempts, its floor and its manifests, read from every device and mended on each."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from ..core.errors import CorruptDataError, DataError, EverstepError, FormatVersionError, NotFoundError
from .catalogue import shard_record
from .device import Device
from .durable import TEMPORARY_PREFIX, make_directories, publish_over
from .findings import Severity
from .manifest_format import (
    ManifestName,
    decode_manifest_head,
    manifest_name,
    parse_manifest_name,
)
from .manifest_types import ManifestHead
from .recovery_devices import COPY_SUFFIX, LOST_SUFFIX, Found, RecoveryDevices
from .run_store import (
    ATTEMPTS_NAME,
    COMMITS_NAME,
    DAMAGED_NAME,
    FLOOR_NAME,
    RUN_NAME,
    TAGS_NAME,
    RunStore,
    create_run_directories,
)
from .segment_check import check_segment_file
from .store_format import (
    Attempt,
    DamageList,
    Floor,
    RunId,
    decode_attempt,
    decode_damage,
    decode_floor,
    decode_tag,
    encode_attempt,
    encode_floor,
    is_tag_file,
)
from .succession_plan import newest_first, takes_place_of


def recover_run(devices: RecoveryDevices, identity: RunId) -> RunStore:
    """Return the run with everything that its devices say of it, durable and with a copy on each device."""
    run = RunStore(devices.store, identity)
    recovery = _RunRecovery(devices, run)
    recovery.prepare(identity)
    run.load(attempts=recovery.attempts(), floor=recovery.floor())
    recovery.shards()
    recovery.damage()
    recovery.tags()
    return run


class _RunRecovery:
    """Reads and mends one run; each method leaves it in a state from which recovery could start again."""

    def __init__(self, devices: RecoveryDevices, run: RunStore) -> None:
        self._devices = devices
        self._ops = devices.ops
        self._run = run
        self._holding: frozenset[Device] = frozenset()

    @property
    def _present(self) -> list[Device]:
        """The devices that can be read and have the run's directories."""
        return [device for device in self._devices.present if device in self._holding]

    def prepare(self, identity: RunId) -> None:
        """Make the run's directories whole, where a crash or a new device left them out, and drop unfinished files."""
        named = self._devices.each(
            self._devices.present, lambda each: self._ops.stat(self._run.path_on(each) / RUN_NAME) is not None
        )
        for device in [device for device, is_named in named.items() if not is_named]:
            self._devices.find(
                Severity.REPAIRABLE,
                self._run.path_on(device),
                "the run's directories and run.json are not whole here",
                "makes them",
            )
        for device in self._devices.present:
            self._devices.mend(device, lambda d=device: create_run_directories(self._ops, d, identity))
        has_run = self._devices.each(
            self._devices.present, lambda each: self._ops.stat(self._run.commits_path(each)) is not None
        )
        self._holding = frozenset(device for device, has in has_run.items() if has)
        self._devices.each(self._present, self._drop_temporaries)

    def _drop_temporaries(self, device: Device) -> None:
        path = self._run.path_on(device)
        for directory in (path, path / ATTEMPTS_NAME, path / COMMITS_NAME, path / TAGS_NAME):
            self._devices.drop_temporaries(directory)

    # --- attempts and floor -------------------------------------------------------------------------------------

    def attempts(self) -> list[Attempt]:
        """Return every attempt that any device knows, after making it durable on all."""
        names = self._devices.each(self._present, self._attempt_names)
        known = {name for found in names.values() for name in found}
        return [self._attempt(name) for name in sorted(known, key=int)]

    def _attempt_names(self, device: Device) -> list[str]:
        directory = self._run.path_on(device) / ATTEMPTS_NAME
        names = [name for name in self._ops.list_directory(directory) if _is_number(name)]
        self._devices.sync(device, directory)
        return names

    def _attempt(self, name: str) -> Attempt:
        def decode(content: bytes, where: str) -> Attempt:
            attempt = decode_attempt(content, where)
            if str(attempt.attempt) != name:
                raise CorruptDataError(f"{where} says attempt {attempt.attempt}")
            return attempt

        paths = {device: self._run.path_on(device) / ATTEMPTS_NAME / name for device in self._present}
        found = self._devices.read_copies(paths, decode)
        attempts = [decode(content, "") for content in found.whole]
        # The number counts as used even when nobody can say any more whether it started anew.
        attempt = Attempt(attempt=int(name), fresh=any(each.fresh for each in attempts))
        if not attempts:
            self._devices.problem(
                f"run {self._run.name!r}: whether attempt {name} started anew is lost",
                next(iter(paths.values())),
            )
        for device, error in found.bad.items():
            self._devices.quarantine(device, paths[device], self._run.run_id, COPY_SUFFIX, error)
        good = {device for holders in found.whole.values() for device in holders}
        for device, path in paths.items():
            if device not in good:
                self._devices.make_copy(device, path, encode_attempt(attempt))
        return attempt

    def floor(self) -> Floor | None:
        """Return the newest floor that any device knows, after making it durable on all."""
        paths = {device: self._run.path_on(device) / FLOOR_NAME for device in self._present}
        found = self._devices.read_copies(paths, decode_floor)
        for device, error in found.bad.items():
            self._devices.quarantine(device, paths[device], self._run.run_id, COPY_SUFFIX, error)
        floors = [(decode_floor(content, ""), content) for content in found.whole]
        if not floors:
            return None
        floor = max((each for each, _ in floors), key=lambda each: each.newest)
        for device, path in paths.items():
            self._devices.sync(device, path.parent)
            if not any(each == floor and device in found.whole[content] for each, content in floors):
                self._devices.find(
                    Severity.REPAIRABLE,
                    path,
                    f"it does not say that {floor.newest} is complete on all ranks",
                    "writes it again",
                )
                self._devices.mend(device, lambda p=path: publish_over(self._ops, p, encode_floor(floor)))
        return floor

    # --- manifests ----------------------------------------------------------------------------------------------

    def shards(self) -> None:
        """Take every manifest into the run's catalogue, or put it aside."""
        listed = self._devices.each(
            self._present, lambda each: self._ops.list_directory(self._run.commits_path(each))
        )
        # After the listing: every name in it is durable now.
        durable = {device: self._devices.sync(device, self._run.commits_path(device)) for device in listed}
        holders: defaultdict[str, dict[Device, bool]] = defaultdict(dict)
        for device, names in listed.items():
            for name in names:
                holders[name][device] = durable[device]
        for name in sorted(holders):
            parsed = parse_manifest_name(name)
            if name.startswith(TEMPORARY_PREFIX):  # of a daemon at work: this store is open for reading only
                continue
            if parsed is None:
                self._devices.problem(
                    f"run {self._run.name!r}: {name!r} in {COMMITS_NAME} is no manifest's name; left alone",
                    self._run.commits_path(next(iter(holders[name]))) / name,
                    severity=Severity.NOTE,
                )
            else:
                self._shard(parsed, holders[name])

    def _shard(self, name: ManifestName, holders: Mapping[Device, bool]) -> None:
        """Take one manifest into the catalogue, durable and with a copy on each device; or put it aside.

        `holders` are the devices that have the name, and whether it is durable there.
        """
        file_name, run, devices = manifest_name(*name), self._run, self._devices
        try:
            found = devices.read_copies(
                {device: run.commits_path(device) / file_name for device in holders},
                lambda content, _: _head_for(run, name, content),
            )
        except FormatVersionError as exc:
            run.unreadable = str(exc)
            run.lost[name.checkpoint] = f"rank {name.rank}: {file_name}: {exc}"
            devices.problem(
                f"run {run.name!r}: {file_name} is not offered: {exc}",
                run.commits_path(next(iter(holders))) / file_name,
                severity=Severity.NOTE,
            )
            return
        chosen = self._chosen(name, found.whole)
        if chosen is not None:
            self._put_aside(found.bad, file_name, COPY_SUFFIX)
            self._accept(name, holders, chosen, found)
        elif found.whole:
            error = CorruptDataError(f"{file_name} has different contents on different devices")
            both = [device for copies in found.whole.values() for device in copies]
            self._put_aside(dict.fromkeys((*found.bad, *both), error), file_name, LOST_SUFFIX)
        elif found.bad:
            self._lose(name, found)

    def _chosen(self, name: ManifestName, contents: Collection[bytes]) -> bytes | None:
        """Return the content to believe: the newest one that is whole; None when two writers contradict each other.

        A shard that was written again has an older manifest where a device was away. The newest one was published
        only once its segments were durable; an older one is right, too, while it has all of its own.
        """
        if len(contents) < 2:
            return next(iter(contents), None)
        by_generation = {_head_for(self._run, name, content).generation: content for content in contents}
        heads = [_head_for(self._run, name, content) for content in by_generation.values()]
        ordered = newest_first(heads) if len(heads) == len(contents) else ()
        whole = [head for head in ordered if not self._first_problem(head)]
        return next((by_generation[head.generation] for head in (*whole, *ordered)), None)

    def _lose(self, name: ManifestName, found: Found) -> None:
        """No copy is whole: put them aside, unless a device that may have one cannot be read now."""
        run, reason = self._run, "; ".join(str(error) for error in found.bad.values())
        if self._devices.writes and not self._devices.store.may_delete:
            self._devices.problem(
                f"run {run.name!r}: {manifest_name(*name)} is not offered, nor put aside while a device"
                f" that may have a whole copy is not there: {reason}",
                run.commits_path(next(iter(found.bad))) / manifest_name(*name),
            )
            return
        run.lost[name.checkpoint] = f"rank {name.rank}: {manifest_name(*name)}: {reason}"
        self._put_aside(found.bad, manifest_name(*name), LOST_SUFFIX)

    def _put_aside(self, bad: Mapping[Device, DataError], file_name: str, suffix: str) -> None:
        for device, error in bad.items():
            path = self._run.commits_path(device) / file_name
            self._devices.quarantine(device, path, self._run.run_id, suffix, error)

    def _accept(
        self, name: ManifestName, holders: Mapping[Device, bool], content: bytes, found: Found
    ) -> None:
        run, file_name, good = self._run, manifest_name(*name), found.whole[content]
        if not any(holders[device] for device in good):
            self._devices.problem(
                f"run {run.name!r}: {file_name} cannot be made durable; not offered",
                run.commits_path(good[0]) / file_name,
            )
            return
        head = _head_for(run, name, content)
        problem = self._segment_problem(head)
        for device in self._present:
            path, others = run.commits_path(device) / file_name, found.other_than(content, device)
            if device not in good and not others:
                self._devices.make_copy(device, path, content)
            elif not problem and _replaces(head, others):
                self._devices.replace_copy(device, path, content)
        run.add_shard(shard_record(head, content, problem))
        self._devices.report.shard_count += 1

    def _first_problem(self, head: ManifestHead) -> str:
        """Return what is wrong with the first bad segment, or an empty string."""
        problem = ""
        for record in head.segments:
            try:
                with self._devices.store.reading(record.device_id):
                    check_segment_file(self._ops, self._run.segment_path(record), head, record)
            except EverstepError as exc:
                problem = problem or str(exc)
        return problem

    def _segment_problem(self, head: ManifestHead) -> str:
        """Return what is wrong with the first bad segment, or an empty string; a problem is reported."""
        problem = self._first_problem(head)
        if problem:
            self._devices.report.damaged_count += 1
            self._devices.tell(
                f"run {self._run.name!r}: rank {head.rank} of {head.checkpoint} is not offered: {problem}"
            )
        return problem

    def damage(self) -> None:
        """Take what reading has shown into the catalogue, as the copy with the most changes says.

        What is lost of it a scrub finds again, so that no copy is mended: the next change writes all of them.
        """
        run, devices = self._run, self._devices
        paths = {device: run.path_on(device) / DAMAGED_NAME for device in self._present}
        try:
            found = devices.read_copies(paths, decode_damage)
        except FormatVersionError as exc:
            devices.problem(
                f"run {run.name!r}: what was found damaged is unknown: {exc}",
                next(iter(paths.values())),
                severity=Severity.NOTE,
            )
            return
        for device, error in found.bad.items():
            devices.quarantine(device, paths[device], run.run_id, COPY_SUFFIX, error)
        copies = [decode_damage(content, "") for content in found.whole]
        newest = max(copies, key=lambda each: each.change, default=DamageList(change=0, shards=()))
        run.damage_change = newest.change
        for shard in newest.shards:
            if run.mark_damaged(
                shard.checkpoint, shard.rank, shard.problem, generation=shard.generation, is_content=True
            ):
                devices.report.damaged_count += 1
                devices.tell(
                    f"run {run.name!r}: rank {shard.rank} of {shard.checkpoint} is not offered, as reading it"
                    f" has shown before: {shard.problem}"
                )

    # --- tags -----------------------------------------------------------------------------------------------------

    def tags(self) -> None:
        """Take every tag that any device knows into the catalogue, durable and with a copy on each device."""
        listed = self._devices.each(self._present, self._tag_files)
        for file_name in sorted({name for names in listed.values() for name in names}):
            self._tag(file_name)

    def _tag_files(self, device: Device) -> list[str]:
        directory = self._run.path_on(device) / TAGS_NAME
        if self._ops.stat(directory) is None:
            return []
        found = [name for name in self._ops.list_directory(directory) if is_tag_file(name)]
        self._devices.sync(device, directory)
        return found

    def _tag(self, file_name: str) -> None:
        run, devices = self._run, self._devices
        paths = {device: run.path_on(device) / TAGS_NAME / file_name for device in self._present}
        try:
            found = devices.read_copies(paths, lambda content, where: decode_tag(content, where, file_name))
        except FormatVersionError as exc:
            self._unknown_tag(str(exc), file_name)
            return
        tags = [decode_tag(content, "", file_name) for content in found.whole]
        for tag in sorted(tags, key=lambda tag: tag.checkpoint):
            run.load_tag(tag)
        if not tags and not found.bad:
            return
        if len(tags) != 1:
            reasons = "; ".join(str(error) for error in found.bad.values())
            self._unknown_tag(
                reasons or f"tag {file_name} has different contents on different devices", file_name
            )
            return
        for device, error in found.bad.items():
            devices.quarantine(device, paths[device], run.run_id, COPY_SUFFIX, error)
        ((content, good),) = found.whole.items()
        for device in self._present:
            if device not in good:
                parent = run.path_on(device)
                devices.mend(device, lambda p=parent: make_directories(self._ops, p, TAGS_NAME))
                devices.make_copy(device, paths[device], content)
        try:
            run.info(tags[0].checkpoint)
        except NotFoundError:
            devices.problem(
                f"run {run.name!r}: tag {tags[0].name!r} is on {tags[0].checkpoint}, which is not here",
                paths[good[0]],
                severity=Severity.REPAIRABLE,
            )

    def _unknown_tag(self, reason: str, file_name: str) -> None:
        """Nobody knows what a tag keeps, so nothing of the run is removed; its files stay where they are."""
        self._run.unreadable = self._run.unreadable or f"what a tag keeps is unknown: {reason}"
        self._devices.problem(
            f"run {self._run.name!r}: nothing is removed, what a tag keeps is unknown: {reason}",
            self._run.path_on(self._present[0]) / TAGS_NAME / file_name,
        )


def _head_for(run: RunStore, name: ManifestName, content: bytes) -> ManifestHead:
    """Return the head of a manifest found under this name in this run; another's is not believed."""
    head = decode_manifest_head(content)
    if (head.run_id, head.owner_uid, head.checkpoint, head.rank) != (
        run.run_id,
        run.owner_uid,
        name.checkpoint,
        name.rank,
    ):
        raise CorruptDataError(
            f"the manifest is of rank {head.rank}, checkpoint {head.checkpoint}, run {head.run_name!r}"
        )
    return head


def _replaces(head: ManifestHead, others: Iterable[bytes]) -> bool:
    """Tell whether a manifest takes the place of any of these."""
    return any(takes_place_of(head, decode_manifest_head(content)) for content in others)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0")
