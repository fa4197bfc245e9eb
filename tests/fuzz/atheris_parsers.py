"""One parser under libFuzzer, led by coverage: for hours, where hypothesis tries minutes.

    pip install -e '.[fuzz]'
    python tests/fuzz/atheris_parsers.py manifest build/corpus/manifest -max_total_time=3600

The corpus folder is made from the good inputs when it does not exist; libFuzzer adds what reaches new code.
"""

import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1] / "durability")]

with atheris.instrument_imports(include=["everstep"]):  # pyright: ignore[reportAttributeAccessIssue]
    from fuzzing import check
    from targets import TARGETS, Target


def fill(corpus: Path, target: Target) -> None:
    """Put the good inputs into an absent corpus."""
    if not corpus.exists():
        corpus.mkdir(parents=True)
        for number, content in enumerate(target.seeds):
            (corpus / f"good-{number}").write_bytes(content)


def main() -> None:
    """Fuzz the parser that the first argument names; the others are libFuzzer's."""
    names = ", ".join(TARGETS)
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: {sys.argv[0]} PARSER CORPUS [libFuzzer's options]; parsers: {names}")
    target = TARGETS[sys.argv.pop(1)]
    fill(Path(sys.argv[1]), target)

    def test_one_input(content: bytes) -> None:
        check(target, content)
        check(target, target.sign(content))

    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
