"""A command that some system calls are refused to, as a container's seccomp filter does: NUMBER=ERRNO,... COMMAND."""

import ctypes
import os
import struct
import sys

LOAD, EQUALS, ANSWER = 0x20, 0x15, 0x06
"""BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ, BPF_RET."""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def _step(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def refuse(calls: dict[int, int]) -> None:
    """Let each of these system calls, by number, fail with its errno, here and in whatever this process becomes."""
    program = [_step(LOAD, 0, 0, 0)]
    for number, error in calls.items():
        program += [_step(EQUALS, 0, 1, number), _step(ANSWER, 0, 0, ERRNO | error)]
    program.append(_step(ANSWER, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(head)), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    pairs = [pair.split("=") for pair in sys.argv[1].split(",") if pair]
    refuse({int(number): int(error) for number, error in pairs})
    os.execvp(sys.argv[2], sys.argv[2:])
