"""Registers a shared mapping with the first GPU, as a program of its own: exit status 0 where it works.

3: there is no driver or no GPU to try it with; 1: it was refused. What failed is printed. Uses the driver's library
alone, since the command line never imports torch.
"""

import mmap
import os
import sys
from typing import Any, cast

from cffi import FFI

SIZE_BYTES = 4 * 1024 * 1024
FAILED, NOT_TRIED = 1, 3
_CALLS = """
int cuInit(unsigned int);
int cuDeviceGetCount(int *);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemHostRegister_v2(void *, size_t, unsigned int);
int cuMemHostUnregister(void *);
"""


def main() -> int:
    """Try it."""
    ffi = FFI()
    ffi.cdef(_CALLS)
    try:
        cuda = cast(Any, ffi.dlopen("libcuda.so.1"))
    except OSError:
        print("there is no libcuda.so.1")
        return NOT_TRIED
    count = ffi.new("int *")
    code = int(cuda.cuInit(0) or cuda.cuDeviceGetCount(count))
    if code or not count[0]:
        print(f"no usable GPU (CUDA error {code})")
        return NOT_TRIED
    context = ffi.new("void **")
    if code := int(cuda.cuDevicePrimaryCtxRetain(context, 0) or cuda.cuCtxSetCurrent(context[0])):
        print(f"no context on GPU 0 (CUDA error {code})")
        return FAILED
    fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE_BYTES)
    with mmap.mmap(fd, SIZE_BYTES) as memory:
        buffer = ffi.from_buffer(memory)
        code = int(cuda.cuMemHostRegister_v2(buffer, SIZE_BYTES, 0))
        if not code:
            cuda.cuMemHostUnregister(buffer)
        ffi.release(buffer)
    if code:
        print(f"CUDA error {code} for {SIZE_BYTES} bytes of a memfd")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
