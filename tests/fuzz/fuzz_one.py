"""One parser for so many seconds: led by coverage where atheris is installed, else by hypothesis with ever new seeds.

make fuzz TARGET=manifest DURATION=3600
"""

import argparse
import importlib.util
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "durability")]

from fuzzing import fuzz
from targets import TARGETS


def main() -> int:
    """Return 1 when something was found."""
    parser = argparse.ArgumentParser(description="fuzz one parser")
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("seconds", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of hypothesis")
    args = parser.parse_args()
    if importlib.util.find_spec("atheris") is not None:
        corpus = HERE.parents[1] / "build" / "corpus" / args.target
        command = [HERE / "atheris_parsers.py", args.target, corpus, f"-max_total_time={args.seconds}"]
        return subprocess.run([sys.executable, *command], check=False).returncode
    print("atheris is not installed (pip install -e '.[fuzz]'): hypothesis instead, not led by coverage")
    found = fuzz(duration_s=args.seconds, seed_number=args.seed, names=[args.target])
    print(found, *found.failures, sep="\n")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
