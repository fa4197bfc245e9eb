"""The engines against each other: new files, interleaved rounds, ratios to kernel AIO within each round.

python bench/engines.py DIR [--gib 2] [--rounds 7]
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from engine_io import Sample, arena, quartiles, write_new_file

from everstep.checkpoint.engine import Engine, EngineConfig, EngineKind
from everstep.checkpoint.engine_kinds import make_engine

CONFIGS = {
    "aio": (EngineKind.AIO, EngineConfig()),
    "uring": (EngineKind.URING, EngineConfig()),
    "uring, registered": (EngineKind.URING, EngineConfig(register_arenas=True)),
    "plain": (EngineKind.PLAIN, EngineConfig()),
}


def measure(folder: Path, *, size_bytes: int, round_count: int) -> dict[str, list[Sample]]:
    """Return the samples of each engine, one for each round; a round before the first is not counted."""
    samples: dict[str, list[Sample]] = {name: [] for name in CONFIGS}
    with ExitStack() as stack:
        arena_fd = stack.enter_context(arena(size_bytes))
        engines: dict[str, Engine] = {}
        for name, (kind, config) in CONFIGS.items():
            engines[name] = make_engine(kind, config)
            stack.callback(engines[name].close)
        for index in range(round_count + 1):
            for name in (list(CONFIGS) * 2)[index % len(CONFIGS) :][: len(CONFIGS)]:
                sample = write_new_file(engines[name], arena_fd, folder / "everstep-bench.tmp", size_bytes)
                if index:
                    samples[name].append(sample)
    return samples


def table(samples: Mapping[str, list[Sample]]) -> str:
    """Return the result as a table in Markdown."""
    lines = ["| engine | GB/s | ratio to aio (quartiles) | CPU s/GB |", "|---|---|---|---|"]
    for name, own in samples.items():
        ratios = [
            sample.bytes_per_s / base.bytes_per_s for sample, base in zip(own, samples["aio"], strict=True)
        ]
        low, ratio, high = quartiles(ratios)
        speed = quartiles([sample.bytes_per_s / 1e9 for sample in own])[1]
        cpu = quartiles([sample.cpu_s_per_gb for sample in own])[1]
        lines.append(f"| {name} | {speed:.2f} | {ratio:.3f} ({low:.3f}-{high:.3f}) | {cpu:.3f} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(table(measure(args.folder, size_bytes=int(args.gib * 2**30), round_count=args.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
