"""Every step saved, no step stalled: checkpoints and data for PyTorch training.

    import everstep

    loader = everstep.DataLoader(dataset, batch_size=64, shuffle=True, seed=0)
    with everstep.attach("my-run", model=model, optimizer=optimizer, loader=loader, storage=["/nvme0/ckpt"]) as run:
        run.restore()
        for epoch in run.epochs(10):
            for batch in loader:
                ...
                run.step()

Checkpoints: `attach` returns a `Run`; `Keep` (what stays), `Limits` (how often), `Preemption` (what announces the end)
are arguments of it; `run.restore()` returns a `Restored`, `run.report()` a `Report`.

Data: `DataLoader` (resumable, needs no daemon), `CachedDataset` (samples read once for all processes of the node), and
in `everstep.dataloader`: `SharedLoader` (batches prepared once for several jobs), `Mixture`, `BlockShuffle`,
`ShardStream`, `OrderBatchSampler`, `skip`, `Ledger`; `everstep.dataloader.sources` reads stored formats,
`everstep.dataloader.analysis` says what training waits for.

Errors: `except everstep.EverstepError` catches everything that everstep raises on purpose; `errors` has the classes.

Importing this package imports neither torch nor numpy; the first use of a public name does. README.md and docs/ of the
repository explain the rest; `everstep --help` is the command line.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Absolute, alone in the library: type checkers find the mapped folders through build/types (tools/link_types.py).
    from everstep.checkpoint.frequency_types import Limits
    from everstep.checkpoint.keep import Keep
    from everstep.core import errors
    from everstep.core.errors import EverstepError
    from everstep.dataloader import CachedDataset, DataLoader
    from everstep.hook.attach import attach
    from everstep.hook.notice import Preemption
    from everstep.hook.report import Report
    from everstep.hook.restore import Restored
    from everstep.hook.run import Run

__version__ = "0.1.0"

if sys.platform != "linux":
    raise ImportError(f"everstep runs on Linux only (memfd, pidfd, kernel AIO); this is {sys.platform}")
if sys.version_info < (3, 11):  # noqa: UP036  # a checkout on PYTHONPATH is not stopped by requires-python
    raise ImportError(f"everstep needs Python 3.11 or newer; this is {sys.version.split()[0]}")

__all__ = [
    "CachedDataset",
    "DataLoader",
    "EverstepError",
    "Keep",
    "Limits",
    "Preemption",
    "Report",
    "Restored",
    "Run",
    "__version__",
    "attach",
    "errors",
]

# public name -> the module it lives in and its name there; an empty name stands for the module itself
_LAZY = {
    "CachedDataset": (".dataloader", "CachedDataset"),
    "DataLoader": (".dataloader", "DataLoader"),
    "EverstepError": (".core.errors", "EverstepError"),
    "Keep": (".checkpoint.keep", "Keep"),
    "Limits": (".checkpoint.frequency_types", "Limits"),
    "Preemption": (".hook.notice", "Preemption"),
    "Report": (".hook.report", "Report"),
    "Restored": (".hook.restore", "Restored"),
    "Run": (".hook.run", "Run"),
    "attach": (".hook.attach", "attach"),
    "errors": (".core.errors", ""),
}


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = import_module(module_name, __name__)
    value: object = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
