"""Generate proto/node_pb2.py, node_pb2.pyi and node_pb2_grpc.py from proto/node.proto; with --check only compare.

The generated files are committed, so that nobody needs a compiler to use everstep. The virtual path in `-I` makes
the generated imports say `everstep.proto`. The versions that generated them are those of constraints.txt.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "proto/node.proto"
GENERATED = ("node_pb2.py", "node_pb2.pyi", "node_pb2_grpc.py")


def generate(target: Path) -> dict[str, bytes]:
    """Run protoc into `target` and return the generated files by name."""
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ieverstep/proto=proto", *outputs, SOURCE]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = target / "everstep" / "proto"
    return {name: (folder / name).read_bytes().rstrip(b"\n") + b"\n" for name in GENERATED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a committed file is stale"
    )
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as temporary:
        fresh = generate(Path(temporary))
    stale: list[str] = []
    for name, content in fresh.items():
        path = ROOT / "proto" / name
        if path.is_file() and path.read_bytes() == content:
            continue
        stale.append(name)
        if not check:
            path.write_bytes(content)
    if check and stale:
        print(f"stale in proto/: {', '.join(stale)}; run `make proto`", file=sys.stderr)
        return 1
    print(f"proto: {', '.join(stale) + ' written' if stale else 'generated code is fresh'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
