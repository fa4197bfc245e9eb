"""Leaves of any kind, for properties of layouts."""

from hypothesis import strategies as st
from msgspec import structs

from everstep.checkpoint.leaf import LeafSpec, whole_leaf

DTYPES = ("float32", "bfloat16", "uint8", "complex128", "complex64", "float64", "bool", "float8_e4m3fnuz")


@st.composite
def leaves(draw: st.DrawFn) -> list[LeafSpec]:
    """Leaves from empty to some megabytes, a few of them stored in another order of dimensions."""
    count = draw(st.integers(0, 12))
    return [draw(leaf(f"model.{number}")) for number in range(count)]


@st.composite
def leaf(draw: st.DrawFn, name: str) -> LeafSpec:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 5)),
            st.tuples(st.integers(1, 3_000_000)),
            st.tuples(st.integers(0, 3000), st.integers(0, 900)),
        )
    )
    spec = whole_leaf(name, dtype, shape, replicas=draw(st.integers(1, 3)))
    if len(shape) == 2 and all(shape) and draw(st.booleans()):
        return structs.replace(spec, strides=(1, shape[0]))
    return spec
