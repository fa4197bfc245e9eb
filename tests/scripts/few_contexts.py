"""`everstep …` on a node that runs out of kernel AIO contexts: LEFT or CALLS, a number, the command's arguments.

LEFT: so many may be alive at once, as fs.aio-max-nr has it. CALLS: so many are ever made, as where another process
takes the rest between a probe and its use. The rest of the kernel is real, and so are the contexts that it gives.
"""

import errno
import sys

from everstep.checkpoint import kernel_aio
from everstep.checkpoint.linux import SYSCALL, raw_syscall
from everstep.daemon.cli.main import main

KIND, LIMIT = sys.argv[1], int(sys.argv[2])
alive = made = 0


def limited_syscall(number: int, a: int, b: int = 0, c: int = 0, *more: int) -> int:
    """Answer as the kernel does, and EAGAIN where there are no contexts any more."""
    global alive, made
    if number == SYSCALL.io_setup and (alive if KIND == "LEFT" else made) >= LIMIT:
        return -errno.EAGAIN
    result = raw_syscall(number, a, b, c, *more)
    if result >= 0:
        alive += (number == SYSCALL.io_setup) - (number == SYSCALL.io_destroy)
        made += number == SYSCALL.io_setup
    return result


if __name__ == "__main__":
    kernel_aio.raw_syscall = limited_syscall
    sys.exit(main(sys.argv[3:]))
