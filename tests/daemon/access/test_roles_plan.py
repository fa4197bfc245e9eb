"""One table says what each call asks of its caller, and has every call."""

from everstep.daemon.access.roles_plan import ROLES, Role, bare_name, local_role, role_for
from everstep.proto import node_pb2 as pb

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Node"].methods]
READING = ("Get", "List", "Watch")


def test_every_call_has_a_role() -> None:
    assert METHODS
    assert [name for name in METHODS if name not in ROLES] == [], (
        "give it a role in daemon/access/roles_plan.py"
    )


def test_a_call_that_the_table_lacks_is_for_administrators() -> None:
    assert role_for("DropEverything") is Role.ADMIN


def test_who_may_only_look_changes_nothing() -> None:
    changing = [name for name in METHODS if not name.startswith(READING) and name not in _HARMLESS]
    assert "RemoveRun" in changing
    assert {name: role_for(name) for name in changing if role_for(name) is Role.VIEWER} == {}


_HARMLESS = {"IssueToken", "OpenWebSession"}
"""Give their caller no more than it has."""


def test_users_of_the_node() -> None:
    assert (local_role(0, 7), local_role(7, 7), local_role(8, 7)) == (Role.ADMIN, Role.ADMIN, Role.OPERATOR)
    assert Role.VIEWER < Role.OPERATOR < Role.ADMIN
    assert bare_name("/everstep.node.v1.Node/GetStatus") == "GetStatus"
