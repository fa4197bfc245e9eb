"""Record what the control API is, for tests/proto/test_compatibility.py: `python tools/record_api.py NAME [REVISION]`.

Writes tests/proto/recorded/NAME.json: every rpc, message, enum and field with its number and type, and a message of
each kind with all fields set, as bytes and as values. To be done with each release; what is recorded never changes.
REVISION: a commit whose generated code is recorded; left out: the working tree's.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf.json_format import MessageToDict

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "proto" / "recorded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("revision", nargs="?")
    arguments = parser.parse_args()
    target = RECORDED / f"{arguments.name}.json"
    if target.exists():
        print(f"{target} exists, and what is recorded is never changed", file=sys.stderr)
        return 1
    RECORDED.mkdir(exist_ok=True)
    target.write_text(json.dumps(record(_module(arguments.revision)), indent=1, sort_keys=True) + "\n")
    print(f"{target.relative_to(ROOT)} written")
    return 0


def record(module: Any) -> dict[str, object]:
    """Return what generated code says of the API."""
    file = module.DESCRIPTOR
    return {
        "rpcs": {
            method.name: [
                method.input_type.name,
                method.output_type.name,
                method.client_streaming,
                method.server_streaming,
            ]
            for service in file.services_by_name.values()
            for method in service.methods
        },
        "messages": {name: _fields(each) for name, each in file.message_types_by_name.items()},
        "enums": {
            name: {value.name: value.number for value in each.values}
            for name, each in file.enum_types_by_name.items()
        },
        "samples": {name: _sample(getattr(module, name)) for name in file.message_types_by_name},
    }


def _fields(descriptor: Any) -> dict[str, list[object]]:
    return {field.name: field_facts(field) for field in descriptor.fields}


def field_facts(field: Any) -> list[object]:
    """Return the number of a field, its type, whether it is repeated, and the name of its message or enum."""
    kind: Any = field.message_type or field.enum_type
    is_map = _is_map(field)
    types = [field_facts(each)[1] for each in kind.fields] if is_map else []
    return [
        field.number,
        field.type,
        bool(field.is_repeated),
        "map" if is_map else getattr(kind, "name", ""),
        types,
    ]


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _sample(kind: Any) -> dict[str, object]:
    message = filled(kind)
    values = MessageToDict(message, preserving_proto_field_name=True)
    return {"bytes": message.SerializeToString(deterministic=True).hex(), "values": values}


def filled(kind: Any) -> Any:
    """Return a message with every field set to something that is not its default."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if _is_map(field):
            getattr(message, field.name)["key"] = "2.7"
        elif field.message_type is not None:
            inner = filled(field.message_type._concrete_class)
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field))
        else:
            setattr(message, field.name, _value(field))
    return message


def _value(field: Any) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type == field.TYPE_BOOL:
        return True
    if field.type == field.TYPE_STRING:
        return _texts(field.name)
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return 1.5
    if field.type == field.TYPE_BYTES:
        return b"\x01"
    return field.number + 1


def _texts(name: str) -> str:
    """Return a text that whoever reads the field takes."""
    if name in {"checkpoint", "newest_checkpoint", "parent", "complete_floor", "newest_elsewhere"}:
        return "3.14"
    if name.endswith("_json"):
        return "[1]"
    return "6h" if name == "every" else f"some {name}"


def _module(revision: str | None) -> ModuleType:
    """Return the generated code of a revision, which must not be loaded beside another one."""
    name = "proto/node_pb2.py"
    if revision is None:
        text = (ROOT / name).read_text()
    else:
        done = subprocess.run(
            ["git", "show", f"{revision}:{name}"], cwd=ROOT, check=True, capture_output=True
        )
        text = done.stdout.decode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node_pb2.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("recorded_node_pb2", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
