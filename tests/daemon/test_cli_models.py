"""`everstep plan` and `everstep simulate` as people and machines call them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.goodput_failures import FailureProcess
from everstep.checkpoint.goodput_policies import POLICIES
from everstep.daemon.cli.main import main

PLAN = ("plan", "--params", "7e9", "--optimizer", "adamw", "--gpus", "8", "--devices", "4x3GBps")
SIMULATE = ("simulate", "--duration", "6h", "--runs", "1")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "frequency.md"


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_plan_for_people(answer: Any) -> None:
    code, text, _ = answer(*PLAN)
    assert code == 0
    for said in (
        "98 GB, 14 bytes a parameter; each rank 12.2 GB",
        "98 GB by each of 1 node",
        "392 GB of each node: 3 kept, one being written",
        "196 GB on each node, 2 slots",
        "490 ms, beside forward and backward",
        "8.17 s; durable 8.66 s after the boundary",
        "5 ms, and 9.8 ms by slower steps",
        "9.39 s, bound by persist bandwidth: 8.17 s",
        "902 TB by each node, endurance not judged: no drive size",
        "--step TIME",
    ):
        assert said in text, text


def test_plan_says_how_the_size_of_drives_is_given_until_it_is(answer: Any) -> None:
    _, text, _ = answer(*PLAN)
    (given,) = re.findall(r"so their endurance bounds nothing here; give it, such as (--devices \S+)", text)
    assert given == "--devices 4x3GBps/7.68TB"
    _, text, _ = answer(*PLAN[:-2], *given.split())
    assert "1 drive writes" in text
    assert "endurance bounds nothing" not in text
    assert "not judged" not in text


def test_plan_for_machines(answer: Any) -> None:
    code, text, _ = answer(*PLAN, "--step", "300ms", "--mtbf", "3h", "--json")
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 0
    found = document["prediction"]
    assert found["state_size_bytes"] == 98 * 10**9
    assert found["interval_steps"] * 0.3 == pytest.approx(found["interval_s"])
    assert {bound["kind"] for bound in found["bounds"]} == {"least", "budget", "persist bandwidth", "slots"}
    assert document["job"]["limits"]["mtbf_s"] == 10_800


def test_plan_says_what_cannot_be_kept(answer: Any) -> None:
    assert "! at most 5 s of work to lose" in answer(*PLAN, "--most", "5s")[1]
    small = (*PLAN[:-1], "1x3GBps/250GB")
    assert "! the drives of a node hold 2.5 checkpoints: too few" in answer(*small)[1]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("150GB", "98.1 GB on each node, 1 slot of the 2 asked for"),
        ("49GB", "49 GB on each node, too little for one slot of 98.1 GB: the state streams"),
    ],
)
def test_plan_for_a_small_memory(answer: Any, memory: str, said: str) -> None:
    code, text, _ = answer(*PLAN, "--memory", memory, "--step", "1s")
    assert code == 0
    assert said in " ".join(text.split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--optimizer", "adamx"), "no optimizer 'adamx' is known (one of sgd"),
        (("--precision", "fp8"), "no precision 'fp8'"),
        (("--devices", "4 drives"), "'4 drives' describes no devices (such as 4x3GBps"),
        (("--gpus", "0"), "gpus is 0"),
        (("--slots", "1"), "slots is 1"),
        (("--budget", "0"), "budget is 0.0"),
        (("--drive-writes-per-day", "-1"), "drive_writes_per_day is -1.0"),
        (("--bytes-per-param", "0"), "bytes_per_parameter is 0.0"),
        (("--bytes-per-param", "1e308"), "bytes_per_parameter is 1e+308 (0.001 to 1e+06"),
        (("--drive-writes-per-day", "1e-300", "--step", "0.000001ms"), "drive_writes_per_day is 1e-300"),
        (("--params", "1e30", "--step", "999999999w", "--budget", "0.00000000001"), "budget is 1e-11"),
    ],
)
def test_plan_names_what_is_wrong(answer: Any, changes: tuple[str, ...], said: str) -> None:
    code, text, error = answer(*PLAN, *changes)
    assert (code, text) == (2, "")
    assert said.partition(" (")[0] in error
    assert said.partition(" (")[2] in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PLAN, "--params", "many"), "a number such as 7e9 or 7B; got 'many'"),
        ((*PLAN, "--budget", "x%"), "a share such as 3.5% or 0.035; got 'x%'"),
        ((*PLAN, "--step", "1 s"), "a duration is a positive number"),
        (("plan",), "--params"),
    ],
)
def test_what_is_no_value_is_wrong_usage(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_simulate_for_machines_is_the_same_for_the_same_seed(answer: Any) -> None:
    code, text, _ = answer(*SIMULATE, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["policies"].keys() == POLICIES.keys()
    for found in document["policies"].values():
        assert found.keys() == {process.value for process in FailureProcess}
        assert all(0 <= each["goodput"] <= 1 for each in found.values())
    assert answer(*SIMULATE, "--json")[1] == text
    assert answer(*SIMULATE, "--json", "--seed", "2")[1] != text


def test_simulate_for_people(answer: Any) -> None:
    code, text, _ = answer(*SIMULATE, "--change", "slow-device", "--gpus", "1024")
    assert code == 0
    lines = text.splitlines()
    assert "a failure each 2.06 d" in lines[0]
    assert lines[1].split() == [
        "GOODPUT,",
        "%",
        *(each.value for each in FailureProcess),
        "COST",
        "LOST",
        "INTERVAL",
    ]
    assert [line.strip()[: len(name)] for line, name in zip(lines[2:], POLICIES, strict=False)] == list(
        POLICIES
    )


def test_simulate_says_what_a_budget_costs(answer: Any) -> None:
    """13 %: what the controller's own decision says of such a job."""
    dear = ("--gpus", "65536", "--step", "2s", "--stall", "10s", "--slower", "0%", "--persist", "1s")
    code, text, _ = answer(*SIMULATE, *dear, "--budget", "1%")
    assert code == 0
    assert (
        "! everstep keeps a budget of 1 %, which costs 13 % of goodput: for a failure each 46.4 min" in text
    )
    found = json.loads(answer(*SIMULATE, *dear, "--budget", "1%", "--json")[1])["budget_loss"]
    assert found["share"] == pytest.approx(0.13, abs=0.005)
    assert "which costs" not in answer(*SIMULATE, *dear, "--budget", str(found["best_budget"]))[1]


def test_the_page_shows_what_the_command_answers(answer: Any) -> None:
    """Digit by digit: each change to the controller shows there."""
    page = PAGE.read_text()
    (command,) = re.findall(r"\$ everstep (simulate .*)", page)
    change = page.partition("With `--change ")[2].partition("`")[0]
    arguments = command.partition(" --png")[0].replace("slow-device", change).split()
    code, text, _ = answer(*arguments)
    assert code == 0
    table = page[page.index("GOODPUT, %") :].partition("```")[0]
    assert [line.split() for line in table.splitlines()] == [
        line.split() for line in text.splitlines()[1 : 2 + len(POLICIES)]
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--change", "everything"), "--change is 'everything'"),
        (("--runs", "0"), "--runs is 0"),
        (("--budget", "1.5"), "--budget is 1.5"),
        (("--copy", "1d", "--duration", "1d"), "ends before its first checkpoint is durable"),
        (("--duration", "1ms"), "a step, the stall, copy and write take 15.1 s"),
        (("--step", "1ms", "--duration", "100d"), "are too many"),
        (
            ("--step", "1ms", "--persist", "1ms", "--duration", "1h"),
            "with a checkpoint each 1 ms, as some policy",
        ),
        (
            ("--step", "1ms", "--fixed", "1", "--duration", "1h"),
            "with a checkpoint each 1 ms, as some policy",
        ),
        (("--mtbf", "1ms", "--duration", "1h"), "with a failure each 1 ms are too many"),
        (("--png", "/nowhere/at/all.png"), "lies in no directory"),
    ],
)
def test_simulate_names_what_is_wrong(answer: Any, arguments: tuple[str, ...], said: str) -> None:
    code, text, error = answer(*SIMULATE, *arguments)
    assert (code, text) == (2, "")
    assert said in error


def test_simulate_draws_a_picture(answer: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'everstep[plot]'")
    code, text, _ = answer(*SIMULATE, "--png", str(tmp_path / "goodput.png"))
    assert code == 0
    assert "picture: " in text
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_draws_runs_that_are_all_alike(answer: Any, tmp_path: Path) -> None:
    """Where nothing fails each run has the same goodput; a mean that is rounded lies beside three equal numbers."""
    pytest.importorskip("matplotlib", reason="pip install 'everstep[plot]'")
    quiet = ("--duration", "6h", "--mtbf", "9999d", "--runs", "3")
    for fixed in ("100", "200", "300", "400"):
        code, text, _ = answer(
            "simulate", *quiet, "--fixed", fixed, "--json", "--png", str(tmp_path / "quiet.png")
        )
        assert code == 0
        for found in json.loads(text)["policies"].values():
            for each in found.values():
                assert each["goodput_low"] <= each["goodput"] <= each["goodput_high"]


def test_simulate_counts_what_an_optimizer_waits_for_a_copy(answer: Any) -> None:
    """Of 1 s, beside 0.9 of a step of 0.5 s."""
    document = json.loads(
        answer(*SIMULATE, "--step", "500ms", "--copy", "1s", "--stall", "50ms", "--json")[1]
    )
    assert document["job"]["phases"][0]["costs"]["stall_s"] == pytest.approx(0.05 + 1 - 0.45)
    document = json.loads(answer(*SIMULATE, "--change", "short-steps", "--step", "2s", "--json")[1])
    stalls = [phase["costs"]["stall_s"] for phase in document["job"]["phases"]]
    assert stalls == pytest.approx([0.05, 0.05 + 1 - 0.6])


def test_neither_needs_torch_or_numpy() -> None:
    """Nor rich or grpc, while they print JSON."""
    code = (
        "import sys; from everstep.daemon.cli.main import main; "
        f"main({[*PLAN, '--json']}); main({[*SIMULATE, '--json', '--duration', '1h']}); "
        "sys.stderr.write(' '.join(n for n in sys.modules if n in ('torch', 'numpy', 'rich', 'grpc')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stderr == ""
