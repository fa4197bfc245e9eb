"""The three runs of a script, each a process of its own; imports no torch, for the command line's process."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...core.errors import DeadlineError, InternalError, UsageError, error_from_code
from ...core.version import VERSION
from .measured_format import Analysis, Measured, Phase, RunAnswer, ScriptRequest, decode, encode
from .names import Names
from .proc_cores import usable_cores
from .report_plan import Seen, analysis_of, observed_in
from .script_program import ANSWER, NAMES, OUTPUT
from .storage_probe import probe_storage

PROGRAM = "everstep.dataloader.analysis.script_program"
GRACE_S = 10.0
"""For a script to end once enough was seen, and again once it was asked to."""
POLL_S = 0.05
TAIL_LINES = 12
_ORDER = (Phase.SYNTHETIC, Phase.WARM, Phase.COLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to analyze, and how much of it."""

    script: Path
    arguments: Sequence[str] = ()
    directory: Path = field(default_factory=Path.cwd)
    steps: int = 50
    warmup: int | None = None
    seconds: float = 60.0
    """Of the steps that count, in each run."""
    deadline_s: float = 900.0
    """For each run, its start included."""
    loader: int | None = None


def analyze_script(asked: Asked, progress: Callable[[str], None] = lambda _: None) -> Analysis:
    """Run a script three times and return what its steps wait for.

    Raises:
        UsageError: there is no such script, it failed, or its loop is too short; what it printed last is named.
        DeadlineError: a run took longer than its deadline.
    """
    if not asked.script.is_file():
        raise UsageError(
            f"there is no script {asked.script}", hint="`everstep analyze SCRIPT [-- its arguments]`"
        )
    names = Names()
    found: dict[Phase, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="everstep-analyze-") as scratch:
        for number, phase in enumerate(_ORDER, start=1):
            progress(f"run {number} of {len(_ORDER)}: {_SAID[phase]}")
            pick = found[Phase.SYNTHETIC].loader.number if found else asked.loader
            folder = Path(scratch) / phase.value
            folder.mkdir()
            found[phase] = run_phase(asked, phase, folder, pick, names)
    seen = Seen(
        synthetic=found[Phase.SYNTHETIC], warm=found[Phase.WARM], cold=found[Phase.COLD],
        cores=usable_cores(), unseen_files=sorted(names.native),
        written_files=sorted(filter(os.path.exists, names.written)), notes=_notes(found),
    )  # fmt: skip
    progress("probe of the storage")
    size = observed_in(seen).sample_bytes
    probe = probe_storage([*names.read, *names.native], sample_bytes=size) if size else None
    subject = " ".join([asked.script.name, *asked.arguments])
    return analysis_of(seen.with_probe(probe), subject=subject, version=VERSION)


_SAID = {
    Phase.SYNTHETIC: "synthetic, a few batches again and again",
    Phase.WARM: "warm, files in memory",
    Phase.COLD: "cold, files on storage only",
}


def _notes(found: dict[Phase, Measured]) -> list[str]:
    count = found[Phase.SYNTHETIC].loaders_seen
    number = found[Phase.SYNTHETIC].loader.number
    return [f"loader {number} of {count} was measured; --loader names another"] if count > 1 else []


def run_phase(asked: Asked, phase: Phase, folder: Path, pick: int | None, names: Names) -> Measured:
    """Run the script once and return what was seen of loader `pick`; `names` gets the files that it opened.

    `folder` is an empty folder of this run's own. In a cold run the files in `names` leave memory first.

    Raises:
        UsageError, DeadlineError, InternalError: as analyze_script.
    """
    request = ScriptRequest(
        script=os.path.realpath(asked.script),
        arguments=list(asked.arguments),
        directory=str(asked.directory.absolute()),
        scratch=str(folder),
        phase=phase,
        steps=asked.steps,
        warmup=asked.warmup,
        seconds=asked.seconds,
        loader=pick,
        drop=[*names.read, *names.native] if phase is Phase.COLD else [],
    )
    try:
        _carry_out(request, folder, asked.deadline_s)
    finally:
        names.gather(folder / NAMES)
    try:
        answer = decode((folder / ANSWER).read_bytes(), RunAnswer)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise InternalError(
            f"the {phase.value} run ended without an answer{_tail(folder)}",
            hint="it was killed, for lack of memory perhaps, or it left by os._exit",
        ) from error
    if answer.failed is not None:
        raise error_from_code(
            answer.failed.code, f"{answer.failed.message}{_tail(folder)}", answer.failed.hint
        )
    assert answer.measured is not None
    return answer.measured


def _carry_out(request: ScriptRequest, folder: Path, deadline_s: float) -> None:
    """Run the program until it ends, or some time after its answer; nothing of its session is left."""
    with (
        (folder / OUTPUT).open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        ) as child,
    ):
        try:
            assert child.stdin is not None
            child.stdin.write(encode(request))
            child.stdin.close()
            _wait(child, request, folder, time.monotonic() + deadline_s)
        finally:
            _end(child)


def _wait(child: subprocess.Popen[bytes], request: ScriptRequest, folder: Path, end_s: float) -> None:
    """Return once the child has ended, or did not although enough was seen; DeadlineError if it is late."""
    answered_s: float | None = None
    while child.poll() is None:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        if answered_s is None and (folder / ANSWER).exists():
            answered_s = now_s
        if answered_s is not None and now_s > answered_s + GRACE_S:
            return
        if answered_s is None and now_s > end_s:
            raise DeadlineError(
                f"the {request.phase.value} run took longer than its deadline{_tail(folder)}",
                hint="lower --steps or --seconds, or raise --deadline",
            )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and all that it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            break
        _signal(child.pid, number)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    _signal(child.pid, signal.SIGKILL)  # workers that outlived it


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _tail(folder: Path) -> str:
    """Return what the script printed last, as the end of a message."""
    try:
        text = (folder / OUTPUT).read_text(errors="replace")
    except OSError:
        return ""
    last = text.strip().splitlines()[-TAIL_LINES:]
    return "\n  | " + "\n  | ".join(last) if last else ""
