"""Generate the code of every proto/NAME.proto (NAME_pb2.py, .pyi, NAME_pb2_grpc.py); --check compares.

And node_pb2_grpc.pyi, the types of its stub and servicer, which no compiler makes; that of peer.proto is by hand.

The generated files are committed, so that nobody needs a compiler to use everstep. The virtual path in `-I` makes
the generated imports say `everstep.proto`. The versions that generated them are those of constraints.txt.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LINE_CHARS_MAX = 110
STUB_DOC = (
    "Types of the generated service code: a blocking stub (clients) and an asyncio servicer (the daemon)."
)
ROOT = Path(__file__).resolve().parents[1]
NAMES = ("node", "peer", "nvhcd")
GENERATED = tuple(name + ending for name in NAMES for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"))


def generate(target: Path) -> dict[str, bytes]:
    """Run protoc into `target` and return the generated files by name."""
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ieverstep/proto=proto", *outputs]
    command += [f"proto/{name}.proto" for name in NAMES]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = target / "everstep" / "proto"
    found = {name: (folder / name).read_bytes().rstrip(b"\n") + b"\n" for name in GENERATED}
    return found | {"node_pb2_grpc.pyi": stub_types((ROOT / "proto" / "node.proto").read_text()).encode()}


def stub_types(proto: str) -> str:
    """Return the types of the code that is generated of a service: a blocking stub and an asyncio servicer."""
    rpcs = re.findall(r"^  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);$", proto, flags=re.MULTILINE)
    stub = [_stub_line(name, given, answer, stream) for name, given, stream, answer in rpcs]
    servicer = [
        f"    def {name}(\n        self,\n        request: node_pb2.{given},\n"
        f"        context: grpc.aio.ServicerContext[node_pb2.{given}, node_pb2.{answer}],\n"
        f"    ) -> {'AsyncGenerator' if stream else 'Awaitable'}[node_pb2.{answer}]: ..."
        for name, given, stream, answer in rpcs
    ]
    return "\n".join(
        [
            f'"""{STUB_DOC}"""',
            "",
            "from collections.abc import AsyncGenerator, Awaitable",
            "",
            "import grpc",
            "import grpc.aio",
            "",
            "from . import node_pb2",
            "",
            "class NodeStub:",
            *stub,
            "    def __init__(self, channel: grpc.Channel) -> None: ...",
            "",
            "class NodeServicer:",
            *servicer,
            "",
            "def add_NodeServicer_to_server(servicer: NodeServicer, server: grpc.aio.Server) -> None: ...",
            "",
        ]
    )


def _stub_line(name: str, given: str, answer: str, stream: str) -> str:
    kind = "UnaryStreamMultiCallable" if stream else "UnaryUnaryMultiCallable"
    line = f"    {name}: grpc.{kind}[node_pb2.{given}, node_pb2.{answer}]"
    if len(line) <= LINE_CHARS_MAX:
        return line
    return f"    {name}: grpc.{kind}[\n        node_pb2.{given}, node_pb2.{answer}\n    ]"


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
