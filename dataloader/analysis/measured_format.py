"""What the parts of an analysis say to each other, and what `everstep analyze --json` writes: `everstep-analysis/1`."""

from enum import Enum
from typing import Any, Literal, TypeVar, cast

import msgspec

FORMAT = "everstep-analysis/1"

T = TypeVar("T")


class Phase(Enum):
    """Which of the runs."""

    SYNTHETIC = "synthetic"
    """A few batches again and again."""
    WARM = "warm"
    """Files in memory."""
    COLD = "cold"
    """Files on storage only."""


class ScriptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of a script: what the program that runs it is told."""

    script: str
    arguments: list[str]
    directory: str
    """The user's working folder."""
    scratch: str
    """A folder of this run's own."""
    phase: Phase
    steps: int
    warmup: int | None
    seconds: float
    loader: int | None
    """Which of the script's loaders, by the order of their first iteration, from 0; None: the one that trains."""
    drop: list[str] = []
    """Files that leave memory whenever the loader is iterated."""


class LoaderFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The loader that was measured."""

    number: int
    kind: str
    dataset: str
    dataset_length: int | None
    """Samples; None for what has no length."""
    batch_size: float
    """Samples of a batch, mean."""
    workers: int
    start_method: str
    pinned: bool


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of the steps of one run."""

    count: int
    mean_s: float
    median_s: float
    low_s: float
    """Lower quartile."""
    high_s: float
    """Upper quartile."""
    wait_s: float
    """Mean, of the loop for its batch."""


class WorkSeen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds and bytes of all workers together over the steps that count."""

    samples: float = 0.0
    busy_s: float = 0.0
    fetch_s: float = 0.0
    queued_s: float = 0.0
    cpu_s: float = 0.0
    file_bytes: float = 0.0
    storage_bytes: float = 0.0


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one run of a script saw."""

    phase: Phase
    loader: LoaderFacts
    times: Times
    work: WorkSeen
    trainer_cpu_s: float
    """Processor time of the training process over the steps that count."""
    copy_s: float
    """To the device, a step."""
    device: str
    """"cpu" or "cuda": what the steps were timed on."""
    epoch_batches: int
    """Most batches that the loop got of one epoch."""
    loaders_seen: int
    kept_in_memory: list[str] = []
    """Files that did not leave memory."""
    notes: list[str] = []
    lone_cpu_s: float | None = None
    """Processor time of a worker per sample, with one worker and an idle trainer; None where that was not measured."""


class RunFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why a run of a script measured nothing."""

    code: str
    message: str
    hint: str


class RunAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the program that runs a script writes."""

    measured: Measured | None = None
    failed: RunFailed | None = None


class RunReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run, for people and machines."""

    phase: Phase
    samples_per_s: float
    times: Times
    fetch_s: float
    """Of a step, mean; with the next three it is the whole step."""
    preparation_s: float
    copy_s: float
    compute_s: float
    is_bound: bool
    """Whether the speed is only a bound: of a cold run from above (something was in memory), else from below."""
    reasons: list[str]
    """Why it is only a bound."""


class StallReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the differences of the runs say, in seconds of a step."""

    compute_s: float
    preparation_stall_s: float
    fetch_stall_s: float
    preparation_share: float
    """Of a step with everything in memory, 0 to 1."""
    fetch_share: float
    """Of a step with nothing in memory, 0 to 1."""


class ModelReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a sample costs, as calibrated: seconds per sample, and bytes."""

    compute_s: float
    handover_s: float
    preparation_s: float
    cpu_s: float
    trainer_cpu_s: float
    """Of `cpu_s`, the trainer's."""
    latency_s: float
    sample_bytes: float
    storage_bytes_per_s: float | None
    """None where nothing was read from storage."""
    cores: float
    workers: int
    alone_s: float | None = None
    """Of a sample from storage that is little used, where that is less than at the full bandwidth."""
    crowding: float = 1.0
    """How many times as long preparation takes while all cores compute."""


class PredictionReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A setting and its predicted speed."""

    cached: float
    workers: int
    storage_bytes_per_s: float | None
    peers: int
    samples_per_s: float
    limit: str


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predictions, one thing changed in each table."""

    cache: list[PredictionReport]
    workers: list[PredictionReport]
    """With everything in memory."""
    storage: list[PredictionReport]
    peers: list[PredictionReport]
    """Each node with `peer_cached` of the dataset in memory."""
    peer_cached: float
    peer_bytes_per_s: float


class AdviceReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to do."""

    bound: str
    cached: float | None
    workers: int | None
    lacking_cores: bool
    samples_per_s: float
    sentence: str


class Analysis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole result: what `--json` writes."""

    format: Literal["everstep-analysis/1"] = FORMAT
    version: str
    """Of everstep."""
    subject: str
    """The script and its arguments, or what was given instead."""
    loader: LoaderFacts
    device: str
    dataset_bytes: float | None
    runs: list[RunReport]
    stalls: StallReport
    model: ModelReport
    what_if: WhatIf
    advice: AdviceReport
    unseen_files: list[str]
    """Opened by native code, as far as they could be found."""
    written_files: list[str]
    """Opened for writing outside of the scratch folder."""
    notes: list[str]


_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ScriptRequest, RunAnswer, Analysis)
}


def encode(message: msgspec.Struct) -> bytes:
    """Return the JSON of a message; infinities and NaN become null, as JSON wants it."""
    return msgspec.json.encode(message)


def decode(text: bytes, kind: type[T]) -> T:
    """Return a message; msgspec.DecodeError where the text is not exactly that."""
    return cast(T, _DECODERS[kind].decode(text))
