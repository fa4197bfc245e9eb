"""Many copies by few calls: a driver over host memory that takes them together, refuses, or knows no such call."""

import ctypes
import logging
import shutil
import subprocess
from array import array
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from everstep.core.errors import NodeError
from everstep.hook import cuda_memcpy
from everstep.hook.copy_plan import WORD
from everstep.hook.cuda_memcpy import COPIES_MAX, SWITCH_VARIABLE, Copies, CudaMemcpy

SOURCE = Path(__file__).resolve().parents[1] / "support" / "stub_cuda_copies.c"
STREAM = 0x5000
CONTEXT = 0xC000
INVALID_VALUE, NOT_SUPPORTED, ILLEGAL_ADDRESS = 1, 801, 700
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS", 801: b"CUDA_ERROR_NOT_SUPPORTED"}

ffi: Any = cuda_memcpy._ffi


class StubDriver:
    """A CUDA driver whose streams copy at once, from any address to any other."""

    def __init__(
        self,
        *,
        has_batches: bool = True,
        code: int = 0,
        single_code: int = 0,
        takes_host_addresses: int = 1,
        attribute_code: int = 0,
    ) -> None:
        """`code` is what batches return from the second call on, `single_code` what single copies do."""
        self.code, self.single_code = code, single_code
        self._takes_host_addresses, self._attribute_code = takes_host_addresses, attribute_code
        self.flags: list[int] = []
        self.batches: list[int] = []
        """How many copies each took."""
        self.singles = 0
        self.contexts: list[int] = []
        self.context_then: list[int] = []
        """The contexts that were current as something was copied."""
        self._names = {number: ffi.new("char[]", name) for number, name in NAMES.items()}
        self._batch = ffi.callback("Batch", self._copy_all) if has_batches else ffi.NULL

    def cuGetProcAddress_v2(self, name: bytes, function: Any, version: int, flags: int, status: Any) -> int:  # noqa: N802
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        function[0] = ffi.cast("void *", self._batch)
        return 0

    def cuStreamGetCtx(self, stream: Any, context: Any) -> int:  # noqa: N802
        assert int(ffi.cast("uintptr_t", stream)) == STREAM
        context[0] = ffi.cast("void *", CONTEXT)
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(int(ffi.cast("uintptr_t", context)))
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device[0] = 3
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        assert (attribute, device) == (91, 3)
        value[0] = self._takes_host_addresses
        return self._attribute_code

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: Any) -> int:  # noqa: N802
        self.context_then.append(self.contexts[-1])
        if not self.single_code:
            ctypes.memmove(target, source, size)
            self.singles += 1
        return self.single_code

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        if code not in self._names:
            return INVALID_VALUE
        name[0] = self._names[code]
        return 0

    def _copy_all(self, *arguments: Any) -> int:
        targets, sources, sizes, count, attributes, firsts, attribute_count, _, stream = arguments
        assert int(ffi.cast("uintptr_t", stream)) == STREAM
        assert attributes.access_order == 1
        self.flags.append(attributes.flags)
        assert (firsts[0], attribute_count) == (0, 1)
        self.context_then.append(self.contexts[-1])
        if self.code and self.batches:
            return self.code
        for index in range(count):
            ctypes.memmove(targets[index], sources[index], sizes[index])
        self.batches.append(count)
        return 0


class Memory:
    """Tensors of different sizes, and a place for the bytes of each."""

    def __init__(self, count: int) -> None:
        self.sources = [
            torch.full((1 + index % 7,), index % 251, dtype=torch.uint8) for index in range(count)
        ]
        self.targets = [torch.zeros_like(source) for source in self.sources]

    def copies(self) -> Copies:
        targets, sources = (
            array(WORD, [each.data_ptr() for each in tensors]) for tensors in (self.targets, self.sources)
        )
        sizes = array(WORD, [each.nbytes for each in self.sources])
        return Copies(targets=targets, sources=sources, sizes=sizes)

    @property
    def is_copied(self) -> bool:
        return all(map(torch.equal, self.sources, self.targets))


def of(driver: StubDriver) -> CudaMemcpy:
    return CudaMemcpy(cast("cuda_memcpy.Driver", driver))


def test_copies_go_to_the_driver_together_in_the_context_of_their_stream() -> None:
    driver, memory = StubDriver(), Memory(2 * COPIES_MAX + 10)
    of(driver).enqueue(memory.copies(), STREAM)
    assert memory.is_copied
    assert (driver.batches, driver.singles) == ([COPIES_MAX, COPIES_MAX, 10], 0)
    assert (set(driver.context_then), driver.contexts) == ({CONTEXT}, [])


def test_the_structure_is_laid_out_as_the_driver_expects_it() -> None:
    """CUmemcpyAttributes of CUDA 12.8: an enum, two CUmemLocation of an enum and an int, flags."""
    fields = dict(ffi.typeof("Attributes").fields)
    assert ffi.sizeof("Attributes") == 24
    assert {name: field.offset for name, field in fields.items()} == {
        "access_order": 0,
        "source_location": 4,
        "target_location": 12,
        "flags": 20,
    }


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for a driver's library")
def test_a_library_compiled_by_the_drivers_declarations_understands_the_calls(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    words = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE]
    subprocess.run(words, check=True, timeout=60)
    own = ctypes.CDLL(str(library))
    own.stub_stream.restype = ctypes.c_void_p
    memory = Memory(COPIES_MAX + 5)
    CudaMemcpy(ffi.dlopen(str(library))).enqueue(memory.copies(), own.stub_stream())
    assert memory.is_copied
    seen = [ctypes.c_int.in_dll(own, name).value for name in ("batches", "last_count", "depth")]
    assert seen == [2, 5, 0]


@pytest.mark.parametrize("beside_kernels", [True, False])
def test_copies_beside_kernels_are_asked_of_a_copy_engine(beside_kernels: bool) -> None:
    driver, memory = StubDriver(), Memory(5)
    of(driver).enqueue(memory.copies(), STREAM, beside_kernels=beside_kernels)
    assert driver.flags == [int(beside_kernels)]


def test_batches_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "off")
    driver, memory = StubDriver(), Memory(5)
    of(driver).enqueue(memory.copies(), STREAM)
    assert memory.is_copied
    assert (driver.batches, driver.singles) == ([], 5)


@pytest.mark.parametrize(
    "driver",
    [
        StubDriver(has_batches=False),
        StubDriver(takes_host_addresses=0),
        StubDriver(attribute_code=INVALID_VALUE),
    ],
    ids=["has-none", "translates-addresses", "does-not-know"],
)
def test_a_driver_that_cannot_take_batches_gets_copies_one_by_one(driver: StubDriver) -> None:
    memory = Memory(5)
    of(driver).enqueue(memory.copies(), STREAM)
    assert memory.is_copied
    assert driver.singles == 5
    assert (set(driver.context_then), driver.contexts) == ({CONTEXT}, [])


@pytest.mark.parametrize("code", [INVALID_VALUE, NOT_SUPPORTED])
def test_a_driver_that_refuses_them_in_the_middle_gets_all_one_by_one_and_is_not_asked_again(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver, memory = StubDriver(code=code), Memory(COPIES_MAX + 5)
    memcpy = of(driver)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            memcpy.enqueue(memory.copies(), STREAM)
            assert memory.is_copied
    assert (driver.batches, driver.singles) == ([COPIES_MAX], 2 * (COPIES_MAX + 5))
    (record,) = caplog.records
    assert f"cuda_batch_refused code={NAMES[code].decode()}" in record.getMessage()


def test_what_the_driver_refuses_one_by_one_too_is_an_error_and_no_fault_of_the_batches() -> None:
    driver, memory = StubDriver(code=INVALID_VALUE, single_code=INVALID_VALUE), Memory(COPIES_MAX + 5)
    memcpy = of(driver)
    with pytest.raises(NodeError, match="cuMemcpyAsync failed: CUDA_ERROR_INVALID_VALUE"):
        memcpy.enqueue(memory.copies(), STREAM)
    driver.code = 0
    memcpy.enqueue(memory.copies(), STREAM)
    assert (driver.batches, driver.singles) == ([COPIES_MAX, COPIES_MAX, 5], 0)


@pytest.mark.parametrize(
    ("code", "name"), [(ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"), (999, "999")], ids=str
)
@pytest.mark.parametrize(
    ("has_batches", "call"), [(True, "cuMemcpyBatchAsync"), (False, "cuMemcpyAsync")], ids=str
)
def test_earlier_work_that_has_failed_is_an_error(has_batches: bool, call: str, code: int, name: str) -> None:
    driver, memory = StubDriver(has_batches=has_batches, code=code, single_code=code), Memory(COPIES_MAX + 5)
    with pytest.raises(NodeError, match=f"{call} failed: {name}"):
        of(driver).enqueue(memory.copies(), STREAM)
    assert (driver.singles, driver.contexts) == (0, [])


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def dlopen(self, name: str) -> object:
            raise OSError(f"cannot load library {name!r}")

    monkeypatch.setattr(cuda_memcpy, "_ffi", Nothing())
    cuda_memcpy._memcpy.cache_clear()
    with pytest.raises(NodeError, match=r"cannot load library 'libcuda\.so\.1'"):
        cuda_memcpy._memcpy()


@pytest.mark.gpu
@pytest.mark.parametrize("has_batches", [True, False])
def test_a_device_copies_both_ways(has_batches: bool) -> None:
    memcpy = CudaMemcpy(cast("cuda_memcpy.Driver", ffi.dlopen("libcuda.so.1")))
    if has_batches:
        assert memcpy._batch is not None, "this driver is too old for the test"
    else:
        memcpy._batch = None
    there = torch.randint(256, (1000, 1000), dtype=torch.uint8, device="cuda")
    back, again = torch.zeros(1000, 1000, dtype=torch.uint8, pin_memory=True), torch.zeros_like(there)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for sources, targets in ((there, back), (back, again)):
        to, source = (array(WORD, [row.data_ptr() for row in tensor]) for tensor in (targets, sources))
        copies = Copies(targets=to, sources=source, sizes=array(WORD, [1000] * 1000))
        memcpy.enqueue(copies, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(there, again)
    assert torch.equal(there.cpu(), back)
