"""A program that has imported torch and forks trainers, for tests; nothing of the product imports this.

    python -P -m everstep.hook.trainer_server_testing FD

Each message on the socket FD asks for one trainer: JSON (`Order`), and with it three descriptors: a socket on which its
pid and then its exit status are told, its stdout, its stderr. A trainer is a process of its own session with the
arguments, environment and directory of the order; its end is the interpreter's own. It ends as one that was executed
would: only the imports were done before it began. The end of the socket ends the program, not the trainers.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn, TypedDict

IMPORTED = ("torch", "torch._dynamo", "torch.distributed", "cffi.cparser", "msgspec", "xxhash")
"""What a trainer with an optimizer imports, but for everstep: torch._dynamo as soon as the optimizer is made."""

ORDER_BYTES_MAX = 128 * 1024


class Order(TypedDict):
    """What a trainer is to be."""

    arguments: list[str]
    """A script and its arguments, or -m, a module and its arguments."""
    environment: dict[str, str]
    directory: str


def await_order(orders: socket.socket) -> list[str]:
    """Fork a trainer for each order; return in the trainer, with its arguments. The end of the socket ends all else."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a trainer are waited for by nobody
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 3)
        if not message:
            raise SystemExit
        if os.fork() == 0:
            orders.close()
            break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    report, *outputs = descriptors
    if pid := os.fork():
        _tell_end(pid, socket.socket(fileno=report), outputs)
    os.close(report)
    order: Order = json.loads(message)
    _become(order, outputs)
    return order["arguments"]


def _tell_end(pid: int, report: socket.socket, outputs: list[int]) -> NoReturn:
    """Tell the trainer's pid and how it ended, and end."""
    try:
        for descriptor in outputs:
            os.close(descriptor)
        with suppress(BrokenPipeError):  # nobody is interested any more
            report.send(str(pid).encode())
            report.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    finally:
        os._exit(0)


def _become(order: Order, outputs: list[int]) -> None:
    """Take on what an executed process would have from its start."""
    os.setsid()
    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # Python's own generator does this by itself


def main() -> None:
    """Serve; or, in a trainer, run its program."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy all pages of what was imported
    arguments = await_order(socket.socket(fileno=int(sys.argv[1])))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
