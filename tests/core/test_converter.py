"""Structs of plain values; and the threads of a process may all be the first to decode one."""

import subprocess
import sys

import msgspec
import pytest

from everstep.core.converter import Converter


class Inner(msgspec.Struct):
    count: int = 0


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner
    others: dict[str, Inner] = {}


OUTER = Converter(Outer)


def test_values_become_a_struct_or_are_refused() -> None:
    value = {"inner": {"count": 3}, "others": {"a": {}}}
    assert OUTER.convert(value) == Outer(Inner(3), {"a": Inner()})
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$.inner.count`"):
        OUTER.convert({"inner": {"count": "3"}})
    with pytest.raises(msgspec.ValidationError, match="unknown field `more`"):
        OUTER.convert({"inner": {}, "more": 1})


SCRIPT = """
import sys, threading
import msgspec
from everstep.core.converter import Converter
sys.setswitchinterval(1e-6)
values = {f"f{i}": i for i in range(20)}
for _ in range(300):
    inner = msgspec.defstruct("Inner", [(name, "int") for name in values])
    other = msgspec.defstruct("Other", [(name, "int", 0) for name in values])
    outer = Converter(msgspec.defstruct("Outer", [("inner", inner), ("others", dict[str, other])]))
    begin, made = threading.Barrier(3), []
    def convert():
        begin.wait()
        made.append(outer.convert({"inner": values, "others": {"a": {}}}))
    threads = [threading.Thread(target=convert) for _ in range(3)]
    for each in threads: each.start()
    for each in threads: each.join()
    assert made[0].inner.f7 == 7 and len(made) == 3
"""


def test_several_threads_may_be_the_first() -> None:
    """By `msgspec.convert` alone this process dies of SIGSEGV after a few dozen rounds."""
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
