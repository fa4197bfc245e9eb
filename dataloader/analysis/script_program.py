"""Runs a script once, measured: a program, with a request on stdin.

What the script prints goes to `output.txt` of the run's folder, its working folder is there, and the answer is the file
`answer.json`: written as soon as enough was seen, before the script is ended.
"""

import os
import random
import runpy
import statistics
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.analysed import mark_analysed
from ...core.errors import EverstepError, UsageError
from .measured_format import (
    Measured,
    Phase,
    RunAnswer,
    RunFailed,
    ScriptRequest,
    Times,
    WorkSeen,
    decode,
    encode,
)  # fmt: skip

if TYPE_CHECKING:
    from .conductor import Conductor, View
    from .open_watch import OpenWatch
    from .work_folder import WorkFolder

ANSWER, OUTPUT, NAMES, FOLDER = "answer.json", "output.txt", "names", "folder"
SEED = 0
"""Of all generators, so that each run draws the same order; a script's own seed comes later and holds."""


def main() -> int:
    """Run the program."""
    request = decode(sys.stdin.buffer.read(), ScriptRequest)
    mark_analysed()
    _keep_output_apart(Path(request.scratch))
    try:
        ScriptRun(request).run()
    except EverstepError as error:
        _answer(request, RunAnswer(failed=RunFailed(code=error.code, message=error.message, hint=error.hint)))
        return 1
    return 0


class ScriptRun:
    """One run of the script."""

    def __init__(self, request: ScriptRequest) -> None:
        self._request = request
        self._kept: list[str] = []
        self._conductor: Conductor | None = None
        self._is_answered = False

    def run(self) -> None:
        """Run it until enough was seen.

        Raises:
            UsageError: it ended before, by itself or by an exception.
        """
        from .conductor import Conductor, Enough, budget_for  # noqa: PLC0415  torch where a missing one can be said
        from .instrument import Instrument  # noqa: PLC0415
        from .loader_tap import LoaderTap  # noqa: PLC0415
        from .open_watch import watch_opens  # noqa: PLC0415
        from .worker_tap import Watching  # noqa: PLC0415

        request = self._request
        folder = self._enter_folder()
        watching = Watching(
            folder=str(Path(request.scratch) / NAMES),
            drops=request.phase is Phase.COLD,
            work_folder=folder,
        )
        watch = watch_opens(watching.folder, drops=watching.drops, before_change=folder.own)
        conductor = self._conductor = Conductor(
            phase=request.phase,
            budget=lambda loader: budget_for(
                loader, steps=request.steps, warmup=request.warmup, seconds=request.seconds
            ),
            pick=request.loader,
            instrument=lambda loader: Instrument(loader, watching=watching, watch=watch),
            before_epoch=lambda: self._drop(watch),
            finished=self._finished,
        )
        conductor.copies.install()
        ended = "it ended"
        with LoaderTap(conductor).installed():
            try:
                _run_as_main(request, folder)
            except Enough:
                return
            except SystemExit as error:
                ended = f"it called sys.exit({error.code!r})" if error.code else ended
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  whatever a script raises is its own; reported below
                _print(error, request.script)
                ended = f"it raised {type(error).__name__}: {error}{_place(error, request.script)}"
        if not self._is_answered:
            self._end(conductor, ended)

    def _enter_folder(self) -> "WorkFolder":
        from .work_folder import WorkFolder  # noqa: PLC0415

        scratch = Path(self._request.scratch)
        (scratch / NAMES).mkdir()
        (scratch / FOLDER).mkdir()
        folder = WorkFolder(scratch / FOLDER, Path(self._request.directory))
        folder.make()
        os.chdir(folder.path)
        return folder

    def _drop(self, watch: "OpenWatch") -> None:
        if self._request.phase is Phase.COLD:
            from .page_cache import drop  # noqa: PLC0415

            with watch.suspended():
                self._kept = drop(self._request.drop).kept

    def _finished(self, view: "View") -> None:
        assert self._conductor is not None
        _answer(self._request, RunAnswer(measured=measured(self._conductor, view, self._kept)))
        self._is_answered = True

    def _end(self, conductor: "Conductor", ended: str) -> None:
        view = conductor.best()
        if view is not None and not ended.startswith("it raised"):
            view.window.close()
            self._finished(view)
            return
        message, hint = _too_short(conductor, self._request, ended)
        raise UsageError(message, hint=hint)


def measured(conductor: "Conductor", view: "View", kept: Sequence[str]) -> Measured:
    """Return what was seen of the loader that counts."""
    steps, device_s = view.recorder.steps, view.marks.step_times_s()
    each_s = device_s if len(device_s) >= len(steps) else [step.wait_s + step.body_s for step in steps]
    total = view.instrument.totals()
    work = view.window.work
    return Measured(
        phase=conductor.phase,
        loader=view.facts_with(total.samples / total.batches if total.batches else None),
        times=times_of(each_s, [step.wait_s for step in steps]),
        work=WorkSeen(
            samples=work.samples, busy_s=work.busy_s, fetch_s=work.fetch_s, queued_s=work.queued_s,
            cpu_s=work.cpu_s, file_bytes=work.file_bytes, storage_bytes=work.storage_bytes,
        ),
        trainer_cpu_s=view.window.cpu_s,
        copy_s=view.window.copy_s / len(steps),
        device="cuda" if device_s else "cpu",
        epoch_batches=view.recorder.longest_epoch,
        loaders_seen=len(conductor.views),
        kept_in_memory=list(kept),
        notes=_notes(view),
        lone_cpu_s=view.lone_cpu_s,
    )  # fmt: skip


def times_of(each_s: Sequence[float], waits_s: Sequence[float]) -> Times:
    """Return the mean, median and quartiles of some steps."""
    low, median, high = statistics.quantiles(each_s, n=4, method="inclusive")
    return Times(
        count=len(each_s), mean_s=statistics.fmean(each_s), median_s=median, low_s=low, high_s=high,
        wait_s=statistics.fmean(waits_s),
    )  # fmt: skip


def _notes(view: "View") -> list[str]:
    recorder = view.recorder
    if view.is_replaying or recorder.enough:
        return view.instrument.notes
    return [
        *view.instrument.notes,
        (
            f"the loop was shorter than asked: {len(recorder.steps)} of {recorder.budget.steps} steps"
            f" ({recorder.longest_epoch} batches an epoch, {recorder.budget.warmup} of each not counted)"
        ),
    ]


def _run_as_main(request: ScriptRequest, folder: "WorkFolder") -> None:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)  # pyright: ignore[reportUnknownMemberType]
    saved = torch.save

    def save(obj: object, f: object, *arguments: object, **keywords: object) -> None:
        """torch.save, which writes a path by native code: no audit event tells of it."""
        if isinstance(f, str | os.PathLike):
            folder.own(str(Path(os.fspath(f)).absolute()), True)  # pyright: ignore[reportUnknownArgumentType]
        saved(obj, f, *arguments, **keywords)  # pyright: ignore[reportArgumentType]

    torch.save = save
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, str(Path(request.script).parent))
    runpy.run_path(request.script, run_name="__main__")


def _print(error: BaseException, script: str) -> None:
    """Print an exception of the script as Python would, without what called the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames or error.__traceback__))


def _place(error: BaseException, script: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f" (line {lines[-1]})" if lines else ""


def _too_short(conductor: "Conductor", request: ScriptRequest, ended: str) -> tuple[str, str]:
    """Return why nothing was measured, and what to do."""
    name = Path(request.script).name
    if "raised" in ended:
        return f"{name}: {ended}", "run it alone first; what it printed last stands in the message"
    if not conductor.views:
        return (
            f"{name}: {ended} without iterating a torch.utils.data.DataLoader",
            "other loaders: everstep.dataloader.analysis.StallAnalyzer(step, loader) in the script",
        )
    seen = "; ".join(
        f"loader {view.number}: {view.recorder.longest_epoch} batches an epoch"
        f"{'' if view.trains else ', gradients off'}"
        for view in conductor.views
    )
    return (
        f"{name}: {ended} before there were 4 steps to count ({seen})",
        "lower --warmup, let it run for more epochs, or name the loader with --loader",
    )


def _keep_output_apart(scratch: Path) -> None:
    """Send what anybody prints to the run's folder, and give nobody our standard input."""
    sys.stdout.flush()
    output = os.open(scratch / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


def _answer(request: ScriptRequest, answer: RunAnswer) -> None:
    place = Path(request.scratch) / ANSWER
    unfinished = place.with_suffix(".part")
    unfinished.write_bytes(encode(answer))
    unfinished.rename(place)


if __name__ == "__main__":
    sys.exit(main())
