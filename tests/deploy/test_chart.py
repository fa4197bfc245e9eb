"""The chart and the plain manifests: valid for Kubernetes, and read by the product's own parser.

The chart is rendered by Go's own template engine, where `make chart-engine` has installed it. The manifests that are
committed need nothing.
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest
import yaml

from everstep.daemon.config import DaemonConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
POD_MONITOR = json.loads((Path(__file__).with_name("schemas") / "podmonitor-v1.json").read_text())
"""Of the Prometheus operator, which no package of schemas has: where it comes from is said in it."""
sys.path.insert(0, str(ROOT / "tools"))
import render_chart  # pyright: ignore[reportMissingImports]

VERSIONS = ("1.25", "1.31", "1.37")
"""The oldest that Chart.yaml allows, one between, and the newest whose schemas are at hand."""
Document = dict[str, Any]

EVERYTHING: dict[str, Any] = {
    "image": {"digest": "sha256:" + "ab" * 32, "pullSecrets": ["registry"]},
    "user": {"uid": "1000650000", "gid": "1000650000"},
    "devices": {"nvme2": "/mnt/nvme2/everstep"},
    "daemon": {"drainSeconds": 60, "extraConfig": ["", "[scrub]", 'every = "30d"'], "engine": "uring"},
    "terminationGracePeriodSeconds": 90,
    "seccomp": {"type": "Localhost", "localhostProfile": "profiles/io-uring.json"},
    "cache": {"enabled": True, "tokenSecret": "members"},
    "metrics": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "extraConfig": ['address = "0.0.0.0"', 'token_file = "/run/everstep-token/metrics"'],
        "tokenSecret": "scrapers",
    },
    "nodeSelector": {"pool": "training"},
    "tolerations": [{"operator": "Equal", "key": "gpu", "value": "yes", "effect": "NoSchedule"}],
    "maxUnavailable": "10%",
}
LEAST: dict[str, Any] = {
    "healthCheck": {"enabled": False},
    "prepare": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "priorityClass": {"create": False, "name": ""},
    "tolerations": [],
}
CHOICES: dict[str, dict[str, Any]] = {"default": {}, "everything": EVERYTHING, "least": LEAST}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    """The chart's manifests by choice of values."""
    if missing := render_chart.missing_engine():
        pytest.skip(missing)
    defaults = render_chart.default_values()
    return {
        name: list(yaml.safe_load_all(render_chart.render(render_chart.merged(defaults, changes))))
        for name, changes in CHOICES.items()
    }


@pytest.fixture(params=["committed", *CHOICES])
def manifests(request: pytest.FixtureRequest) -> dict[str, Document]:
    """The committed manifests, or one choice's, by kind, each once."""
    if request.param == "committed":
        return by_kind(committed("everstep.yaml"))
    return by_kind(request.getfixturevalue("rendered")[request.param])


def by_kind(documents: list[Document]) -> dict[str, Document]:
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


def committed(name: str) -> list[Document]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / name).read_text()))


def pod_of(document: Document) -> Document:
    return cast(Document, document["spec"]["template"]["spec"])


def check_valid(document: Document) -> None:
    if document["kind"] == "PodMonitor":
        jsonschema.validate(document, POD_MONITOR, cls=jsonschema.Draft7Validator)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def config_of(manifests: dict[str, Document], folder: Path) -> DaemonConfig:
    path = folder / "node.toml"
    path.write_text(manifests["ConfigMap"]["data"]["node.toml"])
    return load_config(path)


def containers(pod: Document) -> Iterator[Document]:
    yield from pod["containers"]
    yield from pod.get("initContainers", [])


def test_every_manifest_is_what_kubernetes_takes(manifests: dict[str, Document]) -> None:
    assert {"DaemonSet", "ServiceAccount", "ConfigMap"} <= set(manifests)
    for document in manifests.values():
        check_valid(document)


def test_the_schemas_do_refuse_what_is_wrong() -> None:
    daemon_set = by_kind(committed("everstep.yaml"))["DaemonSet"]
    check_valid(daemon_set)
    pod_of(daemon_set)["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check_valid(daemon_set)


MONITOR: Document = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PodMonitor",
    "metadata": {"name": "everstep", "labels": {"release": "prometheus"}},
    "spec": {
        "selector": {"matchLabels": {"app": "everstep"}},
        "podMetricsEndpoints": [
            {"port": "metrics", "interval": "15s", "relabelings": [{"sourceLabels": ["a"], "action": "keep"}]}
        ],
    },
}


@pytest.mark.parametrize(
    "changes",
    [
        {"selector": None},
        {"podMetricsEndpoints": [{"port": 9464}]},
        {"podMetricsEndpoints": [{"port": "metrics", "interval": "15 s"}]},
        {"podMetricsEndpoints": [{"targetport": "metrics"}]},
        {"podMetricsEndpoints": [{"authorization": {"credentials": {"name": "scrapers"}}}]},
        {"podMetricsEndpoints": [{"relabelings": [{"action": "rename"}]}]},
        {"endpoints": [{"port": "metrics"}]},
    ],
    ids=json.dumps,
)
def test_the_operators_schema_refuses_what_is_wrong(changes: Document) -> None:
    jsonschema.Draft7Validator.check_schema(POD_MONITOR)
    check_valid(MONITOR)
    wrong = copy.deepcopy(MONITOR)
    wrong["spec"].update(changes)
    with pytest.raises(jsonschema.ValidationError):
        check_valid(wrong)


def test_choices_make_the_kinds_that_they_should(rendered: dict[str, list[Document]]) -> None:
    kinds = {name: {each["kind"] for each in documents} for name, documents in rendered.items()}
    assert kinds["least"] == {"DaemonSet", "ServiceAccount", "ConfigMap"}
    assert kinds["default"] == kinds["least"] | {"NetworkPolicy", "PriorityClass"}
    assert kinds["everything"] == kinds["default"] | {"Service", "PodMonitor"}


def test_committed_manifests_are_the_chart_with_its_defaults(rendered: dict[str, list[Document]]) -> None:
    assert committed("everstep.yaml") == rendered["default"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "render_chart.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_daemon_reads_its_configuration(manifests: dict[str, Document], tmp_path: Path) -> None:
    config = config_of(manifests, tmp_path)
    pod = pod_of(manifests["DaemonSet"])
    (daemon,) = pod["containers"]
    mounts = {mount["mountPath"] for mount in daemon["volumeMounts"]}
    assert set(config.devices.values()) <= mounts
    assert {each["name"]: each["value"] for each in daemon["env"]}["EVERSTEP_SOCKET"] == config.daemon.socket
    assert str(Path(config.daemon.socket).parent.parent) in mounts
    assert Path(config.daemon.socket).parent.name == str(daemon["securityContext"]["runAsUser"])
    ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
    assert ports["metrics"] == config.metrics.port
    assert pod["terminationGracePeriodSeconds"] > config.daemon.drain_s, "it is killed while it writes"
    if config.health_check.socket:
        assert str(Path(config.health_check.socket).parent) in mounts
    if config.cache.listen:
        assert config.cache.listen == f"0.0.0.0:{ports['cache']}"
        service = manifests["Service"]
        assert (service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]) == ("None", ports["cache"])
        assert config.cache.dns == f"{service['metadata']['name']}.everstep.svc:{ports['cache']}"
        assert str(Path(config.cache.token_file).parent) in mounts


def test_memory_holds_the_arenas_and_the_daemon(manifests: dict[str, Document], tmp_path: Path) -> None:
    config = config_of(manifests, tmp_path)
    (daemon,) = pod_of(manifests["DaemonSet"])["containers"]
    memory = daemon["resources"]["limits"]["memory"]
    assert memory == daemon["resources"]["requests"]["memory"], "what is pinned cannot be taken back"
    number, unit = re.fullmatch(r"(\d+)(Gi|Mi)", memory).groups()  # pyright: ignore[reportOptionalMemberAccess]
    limit_bytes = int(number) << {"Gi": 30, "Mi": 20}[unit]
    assert config.memory.arena_max_bytes + config.memory.reserve_bytes + (1 << 30) <= limit_bytes


def test_no_pod_has_more_rights_than_it_needs(manifests: dict[str, Document]) -> None:
    pod = pod_of(manifests["DaemonSet"])
    assert manifests["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["seccompProfile"]["type"] in {"RuntimeDefault", "Localhost"}
    for container in containers(pod):
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert rights.get("privileged", False) is False
    (daemon,) = pod["containers"]
    assert (
        daemon["securityContext"]["runAsNonRoot"],
        "add" in daemon["securityContext"]["capabilities"],
    ) == (
        True,
        False,
    )
    assert not re.search(r"\b(Role|RoleBinding|ClusterRole)", json.dumps(manifests))


def test_a_drive_that_is_not_mounted_keeps_the_pod_from_starting(manifests: dict[str, Document]) -> None:
    volumes = {volume["name"]: volume for volume in pod_of(manifests["DaemonSet"])["volumes"]}
    devices = [volume for name, volume in volumes.items() if name.startswith("device-")]
    assert devices
    assert {volume["hostPath"]["type"] for volume in devices} == {"Directory"}
    mounted = {
        each["name"] for each in containers(pod_of(manifests["DaemonSet"])) for each in each["volumeMounts"]
    }
    assert mounted == set(volumes), "every mount has a volume, every volume is mounted"


def test_the_pods_are_selected_by_what_they_are_labelled(manifests: dict[str, Document]) -> None:
    labels = manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["DaemonSet"]["spec"]["selector"]["matchLabels"] == labels
    if "PodMonitor" in manifests:
        monitor = manifests["PodMonitor"]["spec"]
        assert monitor["selector"]["matchLabels"] == labels
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
        secrets = [each["secret"] for each in pod_of(manifests["DaemonSet"])["volumes"] if "secret" in each]
        credentials = endpoint["authorization"]["credentials"]
        assert credentials["name"] in {each["secretName"] for each in secrets}
    if "NetworkPolicy" in manifests:
        policy = manifests["NetworkPolicy"]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    if "Service" in manifests:
        assert manifests["Service"]["spec"]["selector"] == labels


def test_the_job_finds_the_daemon(tmp_path: Path) -> None:
    manifests = by_kind(committed("everstep.yaml"))
    config = config_of(manifests, tmp_path)
    service, job = committed("training-job.yaml")
    for document in (service, job):
        check_valid(document)
    pod = pod_of(job)
    (train,) = pod["containers"]
    daemon_user = pod_of(manifests["DaemonSet"])["containers"][0]["securityContext"]["runAsUser"]
    assert pod["securityContext"]["runAsUser"] == daemon_user
    assert {each["name"]: each["value"] for each in train["env"]} == {
        "EVERSTEP_SOCKET": config.daemon.socket,
        "EVERSTEP_PRIVATE_DAEMON": "never",
    }
    hosts = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    shared = [mount for mount in train["volumeMounts"] if hosts[mount["name"]]]
    assert [(mount["mountPath"], hosts[mount["name"]], mount["readOnly"]) for mount in shared] == [
        (str(Path(config.daemon.socket).parent), str(Path(config.daemon.socket).parent), True)
    ]
    assert pod["subdomain"] == service["metadata"]["name"]
    text = (ROOT / "deploy" / "kubernetes" / "training-job.yaml").read_text()
    assert all(name in text for name in config.devices)


@pytest.mark.root
def test_the_prepare_container_does_its_work_with_two_capabilities(
    rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    assert rendered, "the engine is there"
    sockets, health, secret, token = (tmp_path / name for name in ("sockets", "health", "secret", "token"))
    for folder in (sockets, health, secret, token):
        folder.mkdir()
    for name in ("cache", "metrics"):
        (secret / name).mkdir()
        (secret / name / "token").write_text("t" * 64)
    changes = {
        "socketDirectory": str(sockets),
        "healthCheck": {"directory": str(health)},
        "cache": {"enabled": True},
        "metrics": {"tokenSecret": "scrapers"},
    }
    documents = yaml.safe_load_all(
        render_chart.render(render_chart.merged(render_chart.default_values(), changes))
    )
    (prepare,) = next(pod_of(each)["initContainers"] for each in documents if each["kind"] == "DaemonSet")
    shell, option, script = prepare["command"]
    script = script.replace("/run/everstep-secret", str(secret)).replace("/run/everstep-token", str(token))
    rights = prepare["securityContext"]["capabilities"]["add"]
    allowed = ",".join(["-all", *(f"+{each.lower()}" for each in rights)])
    for _ in range(2):  # it runs again with every pod
        command = ["setpriv", f"--bounding-set={allowed}", "--no-new-privs", shell, option, script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    found = {path: path.stat() for path in (sockets / "1000", health, token / "cache", token / "metrics")}
    assert [(each.st_uid, each.st_gid, each.st_mode & 0o7777) for each in found.values()] == [
        (1000, 1000, 0o700),
        (1000, 1000, 0o755),
        (1000, 1000, 0o400),
        (1000, 1000, 0o400),
    ]


class TestValues:
    """values.schema.json: what helm refuses."""

    @pytest.fixture
    def schema(self) -> Document:
        return cast(Document, json.loads((render_chart.CHART / "values.schema.json").read_text()))

    @pytest.mark.parametrize("name", CHOICES)
    def test_the_choices_of_these_tests_are_allowed(self, schema: Document, name: str) -> None:
        jsonschema.Draft7Validator.check_schema(schema)
        values = render_chart.merged(render_chart.default_values(), CHOICES[name])
        jsonschema.validate(values, schema, cls=jsonschema.Draft7Validator)

    @pytest.mark.parametrize(
        "changes",
        [
            {"image": {"tag": "latest"}},
            {"image": {"digest": "sha256:12"}},
            {"user": {"uid": 0}},
            {"user": {"uid": 1_000_000}},
            {"devices": {"nvme0": "relative"}},
            {"devices": {"NVME_0": "/nvme0"}},
            {"devices": {"nvme0": "/nvme0/$(reboot)"}},
            {"daemon": {"arenaMaxBytes": 48_000_000_000}},
            {"daemon": {"engine": "mmap"}},
            {"seccomp": {"type": "Localhost"}},
            {"seccomp": {"type": "Unconfined"}},
            {"metrics": {"podMonitor": {"enabled": True}}},
            {"healthCheck": {"refuse": ["sick"]}},
            {"tolerations": [{"key": "gpu"}]},
            {"colour": "green"},
        ],
        ids=json.dumps,
    )
    def test_what_cannot_be_is_refused(self, schema: Document, changes: Document) -> None:
        values = render_chart.merged(render_chart.default_values(), changes)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values, schema, cls=jsonschema.Draft7Validator)

    def test_every_number_survives_go(self, rendered: dict[str, list[Document]]) -> None:
        """Go prints a float64 of a million or more as 1e+06, and helm's numbers are float64."""
        for documents in rendered.values():
            assert not re.search(r"\d[eE]\+\d", json.dumps(documents))


def test_templates_use_nothing_but_what_the_engine_has() -> None:
    """So that what is tested here is what helm does, which adds functions of its own."""
    known = {"if", "else", "end", "range", "with", "printf", "or", "and", "not", "eq", "ne", "index"}
    for path in (render_chart.CHART / "templates").iterdir():
        for action in re.findall(r"{{-?\s*(.*?)\s*-?}}", path.read_text()):
            words = re.findall(r'(?<![.$"\w%])[a-z]\w*', re.sub(r'"[^"]*"', "", action))
            assert set(words) <= known, f"{path.name}: {action}"
