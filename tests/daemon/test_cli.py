"""The command line as a process: what it prints, its exit codes, its JSON; with a daemon and without."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from pausing import wait_until

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import each_engine, make_state, memory_arena, opened
from everstep.core.errors import UsageError
from everstep.core.ids import CheckpointId
from everstep.core.version import VERSION
from everstep.daemon.cli.main import main
from everstep.daemon.cli.node_commands import parse_target
from everstep.daemon.cli.render import duration_text, size_text
from everstep.daemon.cli.words import is_directory
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.dataloader.ledger_format import LedgerRecord, Tally, sum_ids
from everstep.dataloader.order_format import OrderKind, OrderSpec, ids_between
from everstep.dataloader.state_format import LoaderState
from everstep.proto import frames

EVERSTEP = Path(sys.executable).with_name("everstep")
UID = os.geteuid()
SAMPLES, CURSOR, SEED = 100, 40, 7


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def everstep(*arguments: str | Path) -> Done:
    """Run a command in this process; TestStarting runs the console script."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def everstep_process(*arguments: str | Path, **environment: str) -> Done:
    done = subprocess.run(
        [EVERSTEP, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd="/",
        env={**os.environ, **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("COLUMNS", "80")


def document(*arguments: str | Path, code: int = 0) -> Any:
    done = everstep(*arguments, "--json")
    assert (done.returncode, done.stderr) == (code, ""), done
    return json.loads(done.stdout)


def loader_values(rank: int, world_size: int, *, lost: int | None = None) -> bytes:
    """Return the values of a rank that is in epoch 1 of a loader; `lost`: a sample that never came back."""
    spec = OrderSpec(kind=OrderKind.PERMUTED, seed=SEED)
    ledger = LedgerRecord(SEED)
    handed_out = {0: [*range(SAMPLES)], 1: [*ids_between(spec, 1, SAMPLES, (0, CURSOR))]}
    for epoch, ids in handed_out.items():
        own = ids[rank::world_size]
        if lost is not None:
            own[0] = lost
        ledger.tallies[epoch] = Tally(len(own), sum_ids(SEED, epoch, own))
    state = LoaderState(fingerprint="text", sample_count=SAMPLES, order=spec, epoch=1, cursor=CURSOR)
    component = {"kind": "loader", "state": {"loader": state.to_dict(), "ledger": ledger.to_dict()}}
    return json.dumps({"everstep": {"step": 1}, "train": component}).encode()


def store_shard(
    run: RunStore, checkpoint: CheckpointId, rank: int, world_size: int, *, values: bytes = b"{}"
) -> None:
    state = make_state(run.store, rank)
    draft = replace(
        state.draft(checkpoint, rank=rank, world_size=world_size), values=values, notes={"torch": "2.13.0"}
    )
    with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(run.store) as engines:
        state.copy_into(arena)
        persist_shard(run, draft, arena, engines=engines)


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("d0", "d1")]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def stored(devices: list[Path]) -> list[Path]:
    """Two runs: `pair` of two ranks, whose newest checkpoint lacks one, and `single`, at the end."""
    with opened(devices) as (store, _):
        pair = store.run(UID, "pair", create=True)
        pair.begin_attempt(1, fresh=False)
        for step, ranks in ((10, (0, 1)), (20, (0, 1)), (30, (0, 1)), (40, (0,))):
            for rank in ranks:
                store_shard(pair, CheckpointId(1, step), rank, 2, values=loader_values(rank, 2))
        pair.set_complete_floor(CheckpointId(1, 30))
        single = store.run(UID, "single", create=True)
        single.begin_attempt(1, fresh=False)
        store_shard(single, CheckpointId(1, 5), 0, 1)
    return devices


def segment_files(devices: list[Path], run: str, checkpoint: CheckpointId, rank: int) -> list[Path]:
    with opened(devices, read_only=True) as (store, _):
        found = store.run(UID, run)
        return [found.segment_path(each) for each in found.shard(checkpoint, rank).segments]


class TestStarting:
    def test_help_and_version(self) -> None:
        assert "status" in everstep_process("--help").stdout
        assert everstep_process("--version") == Done(0, f"everstep {VERSION}\n", "")
        for command in ("status", "ls", "show", "verify", "rm", "tag", "untag", "scrub", "daemon", "stop"):
            assert everstep(command, "--help").returncode == 0

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("devices",), "everstep: error: there is no command 'devices': did you mean device?"),
            (("device", "xyz"), "everstep device: error: there is no command 'xyz': --help lists them"),
            ((), "everstep: error: which command? --help lists them"),
        ],
    )
    def test_a_command_that_is_none(self, words: tuple[str, ...], said: str) -> None:
        done = everstep(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == said

    @pytest.mark.parametrize("words", [("ls", "DIRECTORIES"), ("status",), ("ls", "--no-such-option")])
    def test_a_reader_that_leaves_is_no_error(self, stored: list[Path], words: tuple[str, ...]) -> None:
        """Neither while a table is printed, nor an error of everstep, nor one of usage."""
        directories = stored if "DIRECTORIES" in words else []
        command = [
            EVERSTEP,
            *(word for word in words if word != "DIRECTORIES"),
            "--json",
            *directories,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(60) == 0

    def test_help_imports_nothing_heavy(self) -> None:
        code = "import sys; from everstep.daemon.cli import main; main._parser(); print(*sys.modules)"
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        heavy = {"grpc", "rich", "msgspec", "asyncio", "numpy", "torch", "google", "importlib.metadata"}
        assert not heavy & set(done.stdout.split())

    def test_no_command_imports_torch_or_numpy(self, stored: list[Path]) -> None:
        code = (
            "import sys; from everstep.daemon.cli.main import main\n"
            f"assert main(['verify', '--ledger', '--json', {str(stored[0])!r}, {str(stored[1])!r}]) == 0\n"
            "print(*sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        assert not {"torch", "numpy"} & set(done.stderr.split())

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("fly",),
            ("ls", "--what"),
            ("ls", "one", "two"),
            ("show",),
            ("rm", "pair"),
            ("ls", "pair@1.2"),
            ("ls", "\udcff"),
            ("events", "--run", "a\udcff"),
            ("pin", "\udcff", "pair"),
        ],
    )
    def test_wrong_usage_is_2(self, arguments: tuple[str, ...]) -> None:
        done = everstep(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr
        if arguments:
            assert document(*arguments, code=2)["error"]["exit_code"] == 2


class TestWithoutDaemon:
    @pytest.mark.parametrize(
        ("command", "hint"),
        [
            (("status",), "`everstep ls DIR ...` reads storage without a daemon"),
            (("ls",), "name storage directories"),
            (("show", "pair"), "name storage directories"),
            (("verify",), "name storage directories"),
            (("scrub",), "`everstep verify DIR ...` reads storage without a daemon"),
        ],
    )
    def test_no_daemon_is_3_and_says_where_it_looked(self, command: tuple[str, ...], hint: str) -> None:
        done = everstep(*command)
        assert (done.returncode, done.stdout) == (3, "")
        assert f"no daemon answers on {os.environ['EVERSTEP_SOCKET']}" in done.stderr
        assert hint in done.stderr
        assert document(*command, code=3)["error"]["code"] == "DaemonUnavailableError"

    def test_ls_shows_all_runs_newest_first(self, stored: list[Path]) -> None:
        found = document("ls", *stored)["checkpoints"]
        assert [(view["run_name"], view["checkpoint"], view["state"]) for view in found] == [
            ("pair", "1.40", "local"),
            ("pair", "1.30", "complete"),
            ("pair", "1.20", "complete"),
            ("pair", "1.10", "complete"),
            ("single", "1.5", "complete"),
        ]
        assert document("ls", "single", "--storage", *stored)["checkpoints"] == found[-1:]

    def test_tables_fit_80_columns_and_have_no_colour_in_a_pipe(self, stored: list[Path]) -> None:
        for command in (("ls",), ("show", "pair", "--leaves"), ("verify", "--ledger")):
            done = everstep_process(*command, *stored, NO_COLOR="1")
            assert done.returncode == 0, done.stderr
            assert "\x1b" not in done.stdout
            lines = [line for line in done.stdout.splitlines() if not line.startswith("! ")]
            assert max(map(len, lines)) <= 80, lines
        assert "pair" in everstep("ls", *stored).stdout.splitlines()[2]

    def test_show_takes_the_newest_complete_one(self, stored: list[Path]) -> None:
        found = document("show", "pair", *stored)
        assert found["checkpoint"]["checkpoint"] == "1.30"
        assert (len(found["segments"]), found["leaf_count"], found["leaves"]) == (4, 14, [])
        assert {each["device"] for each in found["segments"]} == set(map(str, stored))
        assert all(Path(each["device"], each["file"]).exists() for each in found["segments"])
        leaves = document("show", "pair@1.40", "--leaves", *stored)["leaves"]
        assert (leaves[0]["name"], leaves[0]["shape"]) == ("model.weight", [300, 7])
        assert "torch" in everstep("show", "pair", *stored).stdout

    @pytest.mark.parametrize(
        ("what", "message"),
        [("nobody", "no run 'nobody'"), ("pair@1.99", "no checkpoint 1.99"), ("pair@2", "no run 'pair@2'")],
    )
    def test_what_is_not_there_is_3(self, stored: list[Path], what: str, message: str) -> None:
        for command in (("show", what), ("verify", what)):
            done = everstep(*command, *stored)
            assert (done.returncode, done.stdout) == (3, "")
        assert message in everstep("show", what, *stored).stderr

    def test_hints_say_what_there_is_and_read_the_same_storage(self, stored: list[Path]) -> None:
        storage = f"--storage {stored[0]} {stored[1]}"
        asked = ("--storage", *stored)
        for command, hint in (
            (
                ("show", "pair@1.99"),
                f"the newest are 1.40, 1.30, 1.20; `everstep ls pair {storage}` lists them",
            ),
            (
                ("verify", "pair@1.99"),
                f"the newest are 1.40, 1.30, 1.20; `everstep ls pair {storage}` lists them",
            ),
            (("show", "pair@foo"), f"such as pair@6.627; `everstep ls pair {storage}` lists them"),
            (("show", "nobody"), "the runs are pair, single"),
            (("ls", "nobody"), "the runs are pair, single"),
            (("ls", "pair@1.10"), f"`everstep show pair@1.10 {storage}` does"),
        ):
            code = everstep(*command, *asked).returncode
            assert document(*command, *asked, code=code)["error"]["hint"].endswith(hint), command
            assert hint in everstep(*command, *asked).stderr

    def test_a_run_without_checkpoints_is_said_to_have_none_beside_others(self, stored: list[Path]) -> None:
        with opened(stored) as (store, _):
            store.run(UID, "begun", create=True)
        for command in ("ls", "verify"):
            said = everstep(command, "begun", *stored)
            assert (said.returncode, "run 'begun' has no checkpoint" in said.stdout) == (0, True)
            assert "runs that have: pair, single" in said.stdout

    @pytest.mark.parametrize("command", [("ls",), ("show", "pair"), ("verify", "pair"), ("rm", "pair@1.10")])
    def test_a_directory_that_holds_nothing_of_the_store_is_refused(
        self, stored: list[Path], tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        (tmp_path / "other").mkdir()
        error = document(*command, "--storage", *stored, tmp_path / "other", code=2)["error"]
        assert f"{tmp_path / 'other'} holds nothing of the store in" in error["message"]
        assert not list((tmp_path / "other").iterdir())

    def test_a_missing_device_is_named_where_nothing_is_intact(self, stored: list[Path]) -> None:
        error = document("show", "pair", "--storage", stored[0], code=3)["error"]
        assert error["message"].startswith("run 'pair' has no intact checkpoint while a device is missing")
        assert f"(last seen at {stored[1]})" in error["message"]
        assert "name all directories of the store" in error["hint"]
        assert error["hint"].endswith(f"`everstep ls pair --storage {stored[0]}` lists what is there")

    def test_no_store_is_3_and_none_is_made(self, tmp_path: Path, devices: list[Path]) -> None:
        for command in (("ls",), ("verify",), ("rm", "pair@1.1"), ("rm", "pair", "--all")):
            assert everstep(*command, *devices).returncode == 3
            assert everstep(*command, tmp_path / "absent").returncode == 3
        assert not list(devices[0].iterdir())
        assert not (tmp_path / "absent").exists()

    def test_a_missing_device_is_said(self, stored: list[Path]) -> None:
        done = everstep("ls", stored[0])
        assert done.returncode == 0
        assert f"{stored[1]}) is missing: what lies on it cannot be restored" in done.stdout
        assert f"! {stored[1]} is missing: 5 checkpoints have parts there" in done.stdout
        assert (done.stdout.count("incomplete"), "damaged" in done.stdout) == (5, False)
        found = document("ls", stored[0])["checkpoints"]
        assert {view["state"] for view in found} == {"damaged"}
        assert all(view["missing_on"] == [str(stored[1])] for view in found)
        segments = document("show", "pair@1.30", "--storage", stored[0])["segments"]
        assert {each["device"]: bool(each["file"]) for each in segments} == {
            str(stored[0]): True,
            f"{stored[1]} (missing)": False,
        }

    def test_what_is_damaged_beside_a_missing_device_stays_damaged(self, stored: list[Path]) -> None:
        manifest = json.loads(everstep("show", "single", "--json", *stored).stdout)
        file = next(each["file"] for each in manifest["segments"])
        path = next(device / file for device in stored if (device / file).exists())
        path.unlink()
        assert "damaged" in everstep("ls", "single", *stored).stdout

    def test_an_unknown_run_is_told_the_known_ones(self, stored: list[Path]) -> None:
        done = everstep("show", "pare", *stored)
        assert (done.returncode, done.stderr) == (3, "everstep: no run 'pare'\n  the runs are pair, single\n")
        assert "2 of 2 (ranks 0, 1)" in everstep("show", "pair", *stored).stdout

    def test_columns_are_as_wide_for_each_run(self, stored: list[Path]) -> None:
        heads = [line for line in everstep("ls", *stored).stdout.splitlines() if "CHECKPOINT" in line]
        assert len(heads) == 2
        assert len({line.rstrip() for line in heads}) == 1

    def test_reading_changes_nothing(self, stored: list[Path]) -> None:
        def content() -> dict[Path, tuple[bytes, int]]:
            files = [path for device in stored for path in device.rglob("*") if path.is_file()]
            return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

        before = content()
        everstep("ls", *stored)
        everstep("verify", "--ledger", *stored)
        everstep("show", "pair", "--leaves", *stored)
        assert content() == before


class TestVerify:
    def test_damage_is_1_and_names_file_and_block(self, stored: list[Path]) -> None:
        assert document("verify", *stored)["ok"]
        path = segment_files(stored, "pair", CheckpointId(1, 20), 1)[0]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        done = everstep("verify", "pair", *stored)
        assert done.returncode == 1
        assert f"! {path}: block 0" in done.stdout
        assert [line.split()[:2] for line in done.stdout.splitlines() if "@" in line] == [
            ["intact", "pair@1.40"],
            ["intact", "pair@1.30"],
            ["DAMAGED", "pair@1.20"],
            ["intact", "pair@1.10"],
        ]
        (found,) = document("verify", "pair@1.20", *stored, code=1)["checkpoints"]
        bad = [each for each in found["segments"] if each["problem"]]
        assert [(each["path"], each["bad_block"], each["rank"]) for each in bad] == [(str(path), 0, 1)]
        assert everstep("verify", "pair@1.30", *stored).returncode == 0

    def test_what_is_away_with_its_device_is_1_and_no_damage_as_in_the_table(
        self, stored: list[Path]
    ) -> None:
        """Of what is here each byte is read all the same."""
        here = segment_files(stored, "pair", CheckpointId(1, 20), 1)
        stored[1].rename(stored[1].with_name("away"))
        for name in ("ls", "verify"):
            done = everstep(name, "pair", *stored)
            assert done.returncode == (name == "verify")
            assert "incomplete" in done.stdout
            assert "DAMAGED" not in done.stdout
        (path,) = {*here} & {*stored[0].rglob("*.safetensors")}
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        words = [
            line.split()[:2]
            for line in everstep("verify", "pair", *stored).stdout.splitlines()
            if "@" in line
        ]
        assert words == [
            ["incomplete", "pair@1.40"],
            ["incomplete", "pair@1.30"],
            ["DAMAGED", "pair@1.20"],
            ["incomplete", "pair@1.10"],
        ]

    def test_a_broken_manifest_is_1_for_its_run(self, stored: list[Path]) -> None:
        for device in stored:
            next(device.rglob("1.5.0.mf")).write_bytes(b"{}")
        for command in (("verify", "single"), ("verify",)):
            done = everstep(*command, *stored)
            assert done.returncode == 1
            assert all(f"{device}/runs" in done.stdout for device in stored)
            assert "1.5.0.mf" in document(*command, *stored, code=1)["problems"][0]
        assert everstep("verify", "pair", *stored).returncode == 0
        assert everstep("verify", "single@1.5", *stored).returncode == 3

    def test_a_ledger_proves_exactly_once(self, stored: list[Path]) -> None:
        found = document("verify", "pair@1.20", "--ledger", *stored)
        (ledger,) = found["checkpoints"][0]["ledgers"]
        assert (ledger["place"], ledger["problems"], ledger["missing_ranks"]) == ("train", [], [])
        assert "each sample exactly once" in everstep("verify", "pair@1.20", "--ledger", *stored).stdout

    def test_a_part_of_the_ranks_proves_nothing(self, stored: list[Path]) -> None:
        done = everstep("verify", "pair@1.40", "--ledger", *stored)
        assert done.returncode == 0
        assert "not proven" in done.stdout
        assert (
            "no loader of this checkpoint kept one"
            in everstep("verify", "single", "--ledger", *stored).stdout
        )

    def test_a_damaged_checkpoint_says_nothing_of_its_ledger(self, stored: list[Path]) -> None:
        """Nobody will restore it, and what is proven of the others stands beside it."""
        path = segment_files(stored, "pair", CheckpointId(1, 20), 1)[0]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        found = document("verify", "pair", "--ledger", *stored, code=1)["checkpoints"]
        assert [(each["ok"], "ledgers" in each) for each in found] == [
            (True, True),
            (True, True),
            (False, False),
            (True, True),
        ]
        done = everstep("verify", "pair@1.20", "--ledger", *stored)
        assert "DAMAGED" in done.stdout
        assert "ledger" not in done.stdout

    def test_a_lost_sample_is_1(self, devices: list[Path]) -> None:
        with opened(devices) as (store, _):
            run = store.run(UID, "lossy", create=True)
            run.begin_attempt(1, fresh=False)
            for rank, lost in ((0, None), (1, 3)):
                values = loader_values(rank, 2, lost=lost)
                store_shard(run, CheckpointId(1, 1), rank, 2, values=values)
        assert document("verify", *devices)["ok"]
        found = document("verify", "--ledger", *devices, code=1)
        (ledger,) = found["checkpoints"][0]["ledgers"]
        assert len(ledger["problems"]) == 2
        assert "some were lost and others handed out twice" in ledger["problems"][0]

    def test_a_ledger_that_is_none_is_1(self, devices: list[Path]) -> None:
        with opened(devices) as (store, _):
            run = store.run(UID, "odd", create=True)
            run.begin_attempt(1, fresh=False)
            values = b'{"x": [{"ledger": {"format": "everstep-ledger/1", "seed": {"$int": "zz"}}}]}'
            store_shard(run, CheckpointId(1, 1), 0, 1, values=values)
        (ledger,) = document("verify", "--ledger", *devices, code=1)["checkpoints"][0]["ledgers"]
        assert ledger["place"] == "x[0]"
        assert ledger["problems"]


class TestRemove:
    def test_what_a_restart_may_need_stays(self, stored: list[Path]) -> None:
        for checkpoint in ("1.20", "1.30", "1.40"):
            error = document("rm", f"pair@{checkpoint}", *stored, code=1)["error"]
            assert error["code"] == "ProtectedError"
            assert "--force" in error["hint"]
        assert document("rm", "pair@1.10", *stored)["removed_count"] == 1
        assert everstep("rm", "pair@1.40", "--force", *stored).returncode == 0
        found = document("ls", "pair", *stored)["checkpoints"]
        assert [view["checkpoint"] for view in found] == ["1.30", "1.20"]

    def test_all_of_a_run(self, stored: list[Path]) -> None:
        done = everstep("rm", "pair", "--all", *stored)
        assert done.stdout.startswith("removed 4 checkpoints of pair, ")
        assert [view["run_name"] for view in document("ls", *stored)["checkpoints"]] == ["single"]
        assert everstep("rm", "pair@1.10", "--all", *stored).returncode == 2

    def test_a_held_store_is_told_by_whom(self, stored: list[Path]) -> None:
        with opened(stored):
            error = document("rm", "pair@1.10", *stored, code=1)["error"]
        assert error["code"] == "DeviceLockedError"
        assert "pid 4711" in error["message"]

    def test_nothing_goes_while_a_device_is_missing(self, stored: list[Path]) -> None:
        error = document("rm", "pair@1.10", stored[0], code=1)["error"]
        assert "missing devices" in error["message"]
        assert list(stored[1].rglob("1.10.0.mf"))


class TestTags:
    def test_a_tag_is_shown_and_keeps_its_checkpoint(self, stored: list[Path]) -> None:
        done = everstep("tag", "best so far", "pair@1.10", *stored)
        assert (done.returncode, done.stdout) == (0, "pair@1.10 has the tag 'best so far' and stays\n")
        assert document("tag", "paper", "pair", *stored)["checkpoint"]["checkpoint"] == "1.30"
        found = document("ls", "pair", *stored)["checkpoints"]
        assert [view["tags"] for view in found] == [[], ["paper"], [], ["best so far"]]
        assert "tag:best so far" in everstep("ls", *stored).stdout
        assert "tag:paper" in everstep("show", "pair", *stored).stdout
        error = document("rm", "pair@1.10", *stored, code=1)["error"]
        assert (error["code"], "'best so far'" in error["message"]) == ("ProtectedError", True)
        assert document("untag", "best so far", "pair", *stored)["checkpoint"] == "1.10"
        assert everstep("rm", "pair@1.10", *stored).returncode == 0
        assert everstep("rm", "pair@1.30", "--force", *stored).returncode == 0
        assert not list(stored[0].rglob("tags/*"))

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            (("tag", "best", "pair@1.99"), 3, "no checkpoint 1.99"),
            (("tag", "best", "nobody"), 3, "no run 'nobody'"),
            (("tag", "", "pair"), 2, "1 to 100 bytes"),
            (("tag", "x" * 101, "pair"), 2, "1 to 100 bytes"),
            (("tag", "taken", "pair@1.20"), 2, "is on checkpoint 1.30"),
            (("untag", "best", "pair"), 3, "no tag 'best'"),
            (("untag", "taken", "pair@1.30"), 2, "names its checkpoint itself"),
            (("tag", "best"), 2, "`everstep tag NAME RUN[@ATTEMPT.STEP] --storage"),
            (("untag", "best"), 2, "`everstep untag NAME RUN --storage"),
            (("tag", "pair@1.20", "best"), 2, "`everstep tag best pair@1.20 --storage"),
            (("tag", "pair@1.20", "pair@1.99"), 3, "no checkpoint 1.99"),
        ],
    )
    def test_what_is_refused(
        self, stored: list[Path], words: tuple[str, ...], code: int, message: str
    ) -> None:
        assert everstep("tag", "taken", "pair", *stored).returncode == 0
        done = everstep(*words, *stored)
        assert (done.returncode, done.stdout) == (code, "")
        assert message in done.stderr

    def test_all_of_a_run_goes_with_its_tags_by_force_only(self, stored: list[Path]) -> None:
        everstep("tag", "best", "pair@1.10", *stored)
        refused = document("rm", "pair", "--all", *stored, code=1)["error"]
        assert refused["code"] == "ProtectedError"
        assert "'best'" in refused["message"]
        assert len(document("ls", "pair", *stored)["checkpoints"]) == 4
        assert document("rm", "pair", "--all", "--force", *stored)["removed_count"] == 4
        assert not list(stored[0].rglob("tags/*"))


class TestWithDaemon:
    @pytest.fixture
    def trainer(self, stored: list[Path]) -> Iterator[FakeTrainer]:
        socket_path = Path(os.environ["EVERSTEP_SOCKET"])
        with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
            trainer.open_run(stored, name="pair", world_size=1)
            yield trainer

    def test_every_command_asks_it(self, trainer: FakeTrainer, stored: list[Path]) -> None:
        trainer.begin_attempt(2)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(2, 50), seed=1)
        trainer.event(frames.Persisted)
        complete = ("events", "--kind", "checkpoint_complete")  # said when what is outdated is gone
        wait_until(lambda: "pair@2.50" in everstep(*complete).stdout)
        status = everstep("status").stdout
        assert os.environ["EVERSTEP_SOCKET"] in status
        assert "attached" in status
        assert "2.50 kept, 1 free" in status
        assert all(str(device) in status for device in stored)
        (run,) = document("status")["runs"]
        assert (run["name"], run["attempt"], run["ranks"][0]["pid"]) == ("pair", 2, os.getpid())
        found = document("ls", "pair")["checkpoints"]
        assert (found[0]["checkpoint"], found[0]["is_in_memory"]) == ("2.50", True)
        assert not document("ls", "pair", *stored)["checkpoints"][0]["is_in_memory"]
        assert document("show", "pair@1.30")["leaf_count"] == 14
        assert document("verify", "pair", "--ledger")["ok"]
        assert document("rm", "pair", "--all", code=1)["error"]["code"] == "RunBusyError"
        assert document("rm", "pair@1.20")["removed_count"] == 1
        assert document("tag", "best", "pair@1.30")["checkpoint"]["tags"] == ["best"]
        assert document("show", "pair@1.30")["checkpoint"]["tags"] == ["best"]
        assert "'best'" in document("rm", "pair@1.30", code=1)["error"]["message"]
        assert "'best'" in document("tag", "best", "pair@2.50", code=2)["error"]["message"]
        assert document("untag", "best", "pair")["checkpoint"] == "1.30"
        assert document("untag", "best", "pair", code=3)["error"]["code"] == "NotFoundError"
        arena.close()

    @pytest.mark.usefixtures("trainer")
    def test_a_scrub_begins_in_the_daemon(self, stored: list[Path], tmp_path: Path) -> None:
        assert "scrub: none since the daemon started" in everstep("status").stdout
        assert document("scrub", "single")["checkpoint_count"] == 1
        assert document("scrub", tmp_path, code=3)["error"]["code"] == "NotFoundError"
        assert everstep("scrub", "pair@1.10").returncode == 2
        wait_until(lambda: document("status")["stores"][0]["scrub"]["newest"]["ended_unix_s"] is not None)
        assert "in 1 checkpoint, nothing damaged" in everstep("status").stdout
        assert everstep("scrub", *stored).stdout.startswith("a scrub of 5 checkpoints, ")

    def test_stop(self, trainer: FakeTrainer) -> None:
        assert trainer.devices
        done = everstep("stop")
        assert done.returncode == 0
        assert "has ended" in done.stdout
        assert "1 attached trainer" in done.stdout
        again = everstep("stop")
        assert (again.returncode, "nothing to stop" in again.stdout) == (0, True)
        assert not document("stop")["was_running"]

    def test_a_node_daemon_is_configured_by_a_file(self, stored: list[Path], tmp_path: Path) -> None:
        assert everstep("daemon", "--config", tmp_path / "none.toml").returncode == 2
        config = tmp_path / "node.toml"
        config.write_text(f'[devices]\nnvme0 = "{stored[0]}"\nnvme1 = "{stored[1]}"\n')
        log = tmp_path / "log"
        with log.open("wb") as output:
            command = [EVERSTEP, "daemon", "--config", config]
            process = subprocess.Popen(command, stderr=output)
        try:
            while everstep("status").returncode == 3:
                assert process.poll() is None, log.read_text()
            status = document("status")
            assert not status["daemon"]["is_private"]
            assert status["daemon"]["metrics_port"] > 0
            assert [each["name"] for each in status["stores"][0]["devices"]] == ["nvme0", "nvme1"]
            assert "nvme0" in everstep("status").stdout
            assert len(document("ls")["checkpoints"]) == 5
            assert everstep("stop").returncode == 0
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


names = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1).filter(
    lambda text: text.strip(".") and not is_directory(text) and not text.startswith("-")
)


class TestWords:
    @example("x" * 300, None)  # no file can have this name
    @given(names, st.none() | st.builds(CheckpointId, st.integers(1, 2**40), st.integers(0, 2**40)))
    def test_any_run_name_can_be_given(self, name: str, checkpoint: CheckpointId | None) -> None:
        word = f"{name}@{checkpoint}" if checkpoint else name
        target = parse_target([word, "/somewhere"], [])
        assert target.directories == (Path("/somewhere"),)
        if checkpoint:
            assert (target.run, target.checkpoint) == (name, checkpoint)
        else:
            assert target.title == name

    def test_directories_are_named_once(self, tmp_path: Path) -> None:
        target = parse_target(["run", str(tmp_path)], [str(tmp_path), "elsewhere"])
        assert target.directories == (tmp_path, Path("elsewhere").absolute())
        with pytest.raises(UsageError, match="2 runs"):
            parse_target(["one", "two"], [])

    @pytest.mark.parametrize(
        ("size_bytes", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (2**55, "32768.0 TiB")],
    )
    def test_sizes(self, size_bytes: int, text: str) -> None:
        assert size_text(size_bytes) == text

    @pytest.mark.parametrize(
        ("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (600, "10 min"), (7300, "2 h"), (864000, "10 days")]
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert duration_text(seconds) == text
