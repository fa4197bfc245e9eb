"""The frameworks that take loaders apart, themselves: Accelerate, Lightning, torchdata; and Grain's protocol."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import BlockShuffle, DataLoader, Ledger, OrderBatchSampler, skip
from everstep.dataloader.adapters.for_accelerate import DataLoader as AccelerateLoader
from everstep.dataloader.adapters.for_grain import GrainSource
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order
from everstep.dataloader.sources.protocol import Source

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
N = 23
State = dict[str, Any]
# Keys of a loader's state that Accelerate changes where it finds them (its `adjust_state_dict_for_prefetch`).
PATCHED = {
    "_num_yielded",
    "_sampler_iter_yielded",
    "_index_sampler_state",
    "_iterator_finished",
    "samples_yielded",
}


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def whole(epoch: int = 0) -> list[int]:
    return order(OrderSpec(kind=OrderKind.PERMUTED, seed=3), epoch, N).at(np.arange(N)).tolist()


def numbers(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()


def flat(batches: object) -> list[int]:
    return [i for batch in cast("list[object]", batches) for i in numbers(batch)]


def make(build: Callable[..., Any] = DataLoader, **more: object) -> Any:
    return build(Numbers(), **({"batch_size": 4, "shuffle": True, "seed": 3} | more))


# -- Accelerate -----------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'everstep[frameworks]'")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True)


def test_accelerate_leaves_the_loader_whole(accelerator: Any) -> None:
    loader = make(AccelerateLoader, accelerator=accelerator)
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader]
    ends, seen = list[bool](), list[int]()
    for batch in loader:
        assert accelerator.gradient_state.active_dataloader is loader
        ends.append(accelerator.gradient_state.end_of_dataloader)
        seen += numbers(batch)
        assert loader.state_dict()["cursor"] == len(seen), "nothing is fetched ahead"
    assert seen == whole()
    assert ends == [False] * 5 + [True]
    assert accelerator.gradient_state.active_dataloader is None
    assert (loader.total_batch_size, loader.total_dataset_length) == (4, N)
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_accelerate_saves_and_loads_the_state(accelerator: Any, tmp_path: Path) -> None:
    loader = accelerator.prepare(make(AccelerateLoader, accelerator=accelerator))
    batches = iter(loader)
    seen = [i for _ in range(2) for i in numbers(next(batches))]
    accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state" / "dl_state_dict.bin").is_file()
    del batches
    accelerator.free_memory()
    again = accelerator.prepare(make(AccelerateLoader, accelerator=accelerator))
    accelerator.load_state(str(tmp_path / "state"))
    assert again.state_dict()["cursor"] == 8
    assert seen + flat(again) == whole()
    assert flat(again) == whole(1)


def test_accelerate_accumulates_to_the_last_batch(accelerator: Any) -> None:
    """It synchronises gradients at every second batch and at the last one, which it hears of through the loader."""
    accelerator.gradient_accumulation_steps = 4
    loader, model = make(AccelerateLoader, accelerator=accelerator), torch.nn.Linear(1, 1)
    loader, model = accelerator.prepare(loader, model)
    synced = list[bool]()
    for _ in loader:
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, False, True, False, True]


def test_a_plain_loader_in_accelerate_says_what_to_do(accelerator: Any) -> None:
    prepared = accelerator.prepare(make())
    with pytest.raises(UsageError, match=r"cannot be iterated apart.*everstep\.dataloader\.adapters"):
        next(iter(prepared))


def test_padding_is_told_to_accelerate(accelerator: Any) -> None:
    """Of 4 processes the last step has samples for 3: metrics that were gathered are cut to those."""
    found = list[tuple[bool, int]]()
    for rank in range(4):
        loader = make(AccelerateLoader, accelerator=accelerator, batch_size=5, rank=rank, world_size=4)
        for _ in loader:
            found.append((loader.end_of_dataloader, loader.remainder))
    assert found == [(False, -1), (True, 3)] * 4


@pytest.mark.parametrize(("stop", "rows"), [(22, 2), (23, 1)])
def test_holes_are_no_rows_of_the_last_step(accelerator: Any, stop: int, rows: int) -> None:
    """The last step of 23 samples begins at 20: positions 21 and more are skipped, and processes repeat for these."""
    found = list[int]()
    for rank in range(4):
        options = {"batch_size": 5, "rank": rank, "world_size": 4, "uneven": "step"}
        loader = AccelerateLoader(range(23), accelerator=accelerator, shuffle=True, **options)
        loader.load_state_dict(skip(loader.state_dict(), 21, stop))
        for _ in loader:
            pass
        found.append(loader.remainder)
    assert found == [rows] * 4


def test_a_sampler_of_ones_own_pads_nothing(accelerator: Any) -> None:
    loader = AccelerateLoader(range(5), accelerator=accelerator, sampler=[4, 1, 2], rank=0, world_size=2)
    for _ in loader:
        pass
    assert (loader.end_of_dataloader, loader.remainder) == (True, -1)


def test_no_key_is_one_that_accelerate_patches() -> None:
    loader = make()
    next(iter(loader))
    assert not PATCHED & set(loader.state_dict())


# -- Lightning ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("pytorch_lightning", reason="pip install 'everstep[frameworks]'")


def trainer_of(lightning: Any, folder: Path, **more: object) -> Any:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return lightning.Trainer(default_root_dir=folder, devices=1, max_epochs=2, **quiet, **more)


def module_of(lightning: Any, stop_after: int | None, path: Path) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[int] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seen += batch.tolist()
            return self.layer(batch.float().unsqueeze(1)).sum()

        def on_train_batch_end(self, *_: object) -> None:
            if self.trainer.global_step == stop_after:
                self.trainer.save_checkpoint(path)
                raise KeyboardInterrupt

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    return Module()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("steps", "drop_last"), [(2, False), (6, False), (9, False), (5, True)])
def test_lightning_resumes(lightning: Any, tmp_path: Path, steps: int, drop_last: bool) -> None:
    """Killed after `steps` of 6 per epoch (5 with drop_last), also at an end: what is trained is two epochs exactly."""
    path, per_epoch, n = tmp_path / "mid.ckpt", 5 if drop_last else 6, 20 if drop_last else N
    first, before = module_of(lightning, steps, path), make(drop_last=drop_last)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_of(lightning, tmp_path, enable_checkpointing=False).fit(first, before)
    (held,) = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (held["epoch"], held["cursor"]) == (
        (0, min(n, 4 * steps)) if steps <= per_epoch else (1, 4 * (steps - per_epoch))
    )
    second, loader = module_of(lightning, None, path), make(drop_last=drop_last)
    loader.ledger = Ledger.from_state(before.ledger.state())
    trainer_of(lightning, tmp_path, enable_checkpointing=False).fit(second, loader, ckpt_path=str(path))
    assert first.seen + second.seen == whole(0)[:n] + whole(1)[:n]
    assert Ledger.verify([loader.ledger], loader.state_dict()) == []


def test_lightning_leaves_our_sampler_alone(lightning: Any) -> None:
    """With several processes it would put a DistributedSampler in the place of any that is none."""
    connector = lightning.trainer.connectors.data_connector._DataConnector
    trainer: Any = type("T", (), {})()
    trainer._accelerator_connector = type(
        "C", (), {"use_distributed_sampler": True, "is_distributed": True}
    )()
    holder = type("H", (), {"trainer": trainer})()
    assert connector._requires_distributed_sampler(holder, TorchDataLoader(Numbers()))
    assert not connector._requires_distributed_sampler(holder, make())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("more", [{}, {"shuffle": False}, {"num_workers": 1}, {"batch_size": None}])
def test_lightning_predicts_with_torchs_loader_only(lightning: Any, tmp_path: Path, more: State) -> None:
    """It rebuilds a loader around its sampler there; what it would hand out then nobody has counted."""

    class Module(lightning.LightningModule):
        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[int]:
            return np.atleast_1d(batch).tolist()

    trainer, loader = trainer_of(lightning, tmp_path), make(**more)
    with pytest.raises(UsageError, match="cannot be iterated apart") as info:
        trainer.predict(Module(), loader)
    assert "Lightning's predict" in info.value.hint
    assert loader.state_dict()["cursor"] == 0
    predicted = trainer.predict(Module(), TorchDataLoader(Numbers(), batch_size=4))
    assert [i for batch in predicted for i in batch] == list(range(N))


# -- torchdata ------------------------------------------------------------------------------------------------------


def test_who_can_give_no_weights_takes_no_extra_step() -> None:
    with pytest.raises(UsageError, match="nobody here can give them the weight 0"):
        OrderBatchSampler(Numbers(), 4, uneven="step")


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip(
        "torchdata.stateful_dataloader", reason="pip install torchdata"
    ).StatefulDataLoader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_torchdata_resumes_our_batch_sampler(stateful: Any, workers: int, steps: int) -> None:
    def build() -> Any:
        sampler = OrderBatchSampler(Numbers(), 4, shuffle=True, seed=3)
        return stateful(Numbers(), batch_sampler=sampler, num_workers=workers)

    first = build()
    batches = iter(first)
    seen = [i for _ in range(steps) for i in numbers(next(batches))]
    state = first.state_dict()
    second = build()
    second.load_state_dict(state)
    assert seen + flat(second) == whole()
    assert flat(second) == whole(1)


def test_our_batch_sampler_in_torchs_loader() -> None:
    sampler = OrderBatchSampler(Numbers(), 4, shuffle=True, seed=3)
    loader = TorchDataLoader(Numbers(), batch_sampler=sampler)
    assert len(loader) == 6
    assert flat(loader) == whole()
    assert flat(loader) == whole(1)
    assert sampler.epoch == 2


def test_our_batch_sampler_is_elastic() -> None:
    """Two ranks for two steps, then three: each sample once, but for the rest that "drop" leaves out."""
    two = [OrderBatchSampler(Numbers(), 3, shuffle=True, seed=3, rank=r, world_size=2) for r in range(2)]
    streams = [iter(each) for each in two]
    seen = [i for _ in range(2) for stream in streams for i in next(stream)]
    states = [each.state_dict() for each in two]
    assert states[0] == states[1] == json.loads(json.dumps(states[0]))
    three = [OrderBatchSampler(Numbers(), 3, shuffle=True, seed=3, rank=r, world_size=3) for r in range(3)]
    for each in three:
        each.load_state_dict(states[0])
    rest = [ids for each in three for ids in each]
    assert sorted(seen + [i for ids in rest for i in ids]) == sorted(whole()[:21])
    assert {each.epoch for each in three} == {1}


def test_our_batch_samplers_state_is_a_loaders() -> None:
    sampler = OrderBatchSampler(Numbers(), 4, shuffle=True, seed=3)
    batches = iter(sampler)
    next(batches)
    next(batches)
    loader = make()
    loader.load_state_dict(sampler.state_dict())
    assert flat(loader) == whole()[8:]
    with pytest.raises(LoaderStateError, match="order 'permuted-1', this loader 'sequential-1'"):
        OrderBatchSampler(Numbers(), 4).load_state_dict(sampler.state_dict())
    blocks = OrderBatchSampler(Numbers(), 4, shuffle=BlockShuffle(block=5), seed=3)
    assert sorted(i for ids in blocks for i in ids) == list(range(N))
    blocks.set_epoch(0)
    assert blocks.epoch == 0


# -- Grain ----------------------------------------------------------------------------------------------------------


class Bytes:
    """A source of 5 samples."""

    def __len__(self) -> int:
        return 5

    def get_bytes(self, index: int) -> bytes:
        return str(index * index).encode()

    def fingerprint(self) -> str:
        return "squares"


def as_number(data: bytes | bytearray | memoryview) -> int:
    return int(bytes(data))


def test_a_source_in_grains_form() -> None:
    assert isinstance(Bytes(), Source)
    source = GrainSource(Bytes(), as_number)
    assert [source[i] for i in range(len(source))] == [0, 1, 4, 9, 16]
    assert cast(Any, source)[np.int64(3)] == 9
    assert repr(pickle.loads(pickle.dumps(source))) == "GrainSource(squares)"
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {bad} of 5"):
            source[bad]


def test_a_grain_source_is_a_dataset() -> None:
    loader = cast(Callable[..., DataLoader[int]], DataLoader)(
        GrainSource(Bytes(), as_number), batch_size=5, shuffle=True
    )
    assert sorted(flat(loader)) == [0, 1, 4, 9, 16]
    assert cast(State, loader.state_dict()["dataset"]) == {"fingerprint": "squares", "n": 5}
