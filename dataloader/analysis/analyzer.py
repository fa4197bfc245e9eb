"""The differential runs within a script: a function for one step, and a loader."""

import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from ...core.errors import UsageError
from ...core.version import VERSION
from .conductor import Conductor, Enough, View, budget_for
from .instrument import AnyLoader, Instrument
from .measured_format import Analysis, Measured, Phase
from .names import Names
from .open_watch import watch_opens
from .page_cache import drop
from .proc_cores import usable_cores
from .report_plan import Seen, analysis_of, observed_in
from .script_program import measured
from .storage_probe import probe_storage
from .worker_tap import Watching

EPOCHS_WITHOUT_STEPS_MAX = 3


class StallAnalyzer:
    """What a training step waits for, and what would help.

        analysis = StallAnalyzer(step, loader).run(steps=50)
        print(analysis.advice.sentence)

    `step(batch)` does what the loop's body does, the optimizer's step included: it trains, so give it a model that
    may be spoilt. The loader is torch's or derived from it; it is iterated from its begin in each of three runs. The
    names of files that are opened are kept from here on in a process (an audit hook cannot be removed).

    Args:
        step: the body of the loop.
        loader: gives the batches.
        make_cold: called before each epoch of the cold run, in place of dropping the files from memory: for data that
            files do not hold. It may be undone by `make_warm`, called before the first two runs.
        make_warm: see there.
        sample_bytes: what a sample takes from storage, where no files tell.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        loader: AnyLoader,
        *,
        make_cold: Callable[[], None] | None = None,
        make_warm: Callable[[], None] | None = None,
        sample_bytes: float | None = None,
    ) -> None:
        if not isinstance(cast(object, loader), torch.utils.data.DataLoader):
            raise UsageError(
                f"{type(loader).__qualname__} is not derived from torch.utils.data.DataLoader",
                hint="StallMeter times loops over anything",
            )
        self._step = step
        self._loader = loader
        self._make_cold = make_cold
        self._make_warm = make_warm or (lambda: None)
        self._sample_bytes = sample_bytes
        self._names = Names()

    def run(self, *, steps: int = 50, warmup: int | None = None, seconds: float = 60.0) -> Analysis:
        """Measure three times `steps` steps, fewer where they take `seconds`, and return what they say.

        `warmup` steps of each epoch are not counted; by default as many as batches may be prepared ahead, and three.

        Raises:
            UsageError: the epochs are too short to count any step.
        """
        found: dict[Phase, Measured] = {}
        with tempfile.TemporaryDirectory(prefix="everstep-analyze-") as scratch, _watching(scratch) as folder:
            for phase in (Phase.SYNTHETIC, Phase.WARM, Phase.COLD):
                with self._same_order():
                    found[phase] = self._run(phase, folder, (steps, warmup, seconds))
                self._names.gather(Path(folder))
        seen = Seen(
            synthetic=found[Phase.SYNTHETIC],
            warm=found[Phase.WARM],
            cold=found[Phase.COLD],
            cores=usable_cores(),
            unseen_files=sorted(self._names.native),
            sample_bytes=self._sample_bytes,
        )
        size = observed_in(seen).sample_bytes
        if size and self._make_cold is None:
            seen = seen.with_probe(probe_storage([*self._names.read, *self._names.native], sample_bytes=size))
        return analysis_of(seen, subject=getattr(self._step, "__qualname__", "a step"), version=VERSION)

    def _run(self, phase: Phase, folder: str, asked: tuple[int, int | None, float]) -> Measured:
        steps, warmup, seconds = asked
        answer: list[Measured] = []
        kept: list[str] = []
        watching = Watching(folder=folder, drops=phase is Phase.COLD and self._make_cold is None)
        watch = watch_opens(folder, drops=watching.drops)

        def before_epoch() -> None:
            if phase is not Phase.COLD:
                self._make_warm()
            elif self._make_cold is not None:
                self._make_cold()
            else:
                with watch.suspended():
                    kept[:] = drop([*self._names.read, *self._names.native]).kept

        def finished(view: View) -> None:
            answer.append(measured(conductor, view, kept))

        instrument = Instrument(self._loader, watching=watching, watch=watch)
        conductor = Conductor(
            phase=phase,
            budget=lambda loader: budget_for(loader, steps=steps, warmup=warmup, seconds=seconds),
            pick=0,
            instrument=lambda _: instrument,
            before_epoch=before_epoch,
            finished=finished,
        )
        conductor.copies.install()
        try:
            self._loop(conductor)
        except Enough:
            return answer[0]
        finally:
            conductor.copies.remove()
            instrument.ended()
        raise AssertionError("the loop ends by Enough or an error")

    def _loop(self, conductor: Conductor) -> None:
        idle = 0
        while True:
            before = len(conductor.views[0].recorder.steps) if conductor.views else 0
            for batch in conductor.iterate(self._loader, _iterator):
                self._step(batch)
            view = conductor.views[0]
            idle = idle + 1 if len(view.recorder.steps) == before else 0
            if idle == EPOCHS_WITHOUT_STEPS_MAX:
                raise UsageError(
                    f"an epoch has {view.recorder.longest_epoch} batches, and"
                    f" {view.recorder.budget.warmup} of each do not count",
                    hint="lower warmup=, or give more data",
                )

    @contextmanager
    def _same_order(self) -> Generator[None]:
        """Let the loader begin within this as it did before, and draw the same order."""
        reset: object = getattr(self._loader, "reset", None)
        if callable(reset):
            reset()
        own = cast("torch.Generator | None", self._loader.generator)
        generator = own if own is not None else torch.default_generator
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)
            if callable(reset):
                reset()


def _iterator(loader: AnyLoader) -> Iterator[object]:
    return iter(loader)


@contextmanager
def _watching(scratch: str) -> Generator[str]:
    """Yield a folder for names; the watch of this process is begun by the first run, and ended here."""
    folder = Path(scratch) / "names"
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        watch_opens(str(folder), drops=False).end()
