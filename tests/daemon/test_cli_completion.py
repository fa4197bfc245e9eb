"""Completion in the real shells, and the names of a real daemon; hostile names run nothing."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.daemon.testing import FakeTrainer, node_daemon

EVERSTEP = Path(sys.executable).with_name("everstep")
HOSTILE = "$(touch owned) `touch owned` * 'x"


def script(shell: str) -> str:
    done = subprocess.run([EVERSTEP, "completion", shell], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def run_names(node_config: Path, socket_path: Path) -> Iterator[None]:
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as a, FakeTrainer(socket_path) as b:
        for trainer, name in ((a, "resnet"), (b, HOSTILE)):
            trainer.open_run(["nvme0", "nvme1"], name=name)  # type: ignore[list-item]
        yield


def in_shell(command: list[str], text: str, folder: Path) -> list[str]:
    environment = {**os.environ, "PATH": f"{EVERSTEP.parent}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run(
        [*command, text], capture_output=True, text=True, check=False, timeout=60, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def bash(line: str, folder: Path) -> list[str]:
    """Return what bash offers after `line`, whose last word is being typed."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    text = (
        f"{script('bash')}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _everstep;"
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return [each for each in in_shell(["bash", "--norc", "-c"], text, folder) if each]


def pressed(complete: Callable[[str], list[str]], line: str) -> list[str]:
    """Return what is offered, asked again where nothing is: a busy daemon may be too late for a key."""
    for _ in range(5):
        if found := complete(line):
            return found
    return []


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    assert bash("everstep st", tmp_path) == ["status", "stop"]
    assert bash("everstep device re", tmp_path) == ["retire", "readmit"]
    assert bash("everstep config check --n", tmp_path) == ["--no-machine"]
    assert {"bash", "zsh", "fish"} <= set(bash("everstep completion ", tmp_path))
    assert bash("everstep export x y --to d", tmp_path) == ["dcp"]
    (tmp_path / "stored").mkdir()
    assert bash("everstep doctor st", tmp_path) == ["stored"]


@pytest.mark.usefixtures("run_names")
def test_bash_completes_what_the_daemon_knows_and_runs_none_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()

    def asked(line: str) -> list[str]:
        return bash(line, folder)

    offered = pressed(asked, "everstep show ")
    assert "resnet" in offered
    (hostile,) = [each for each in offered if "owned" in each]
    echoed = subprocess.run(
        ["bash", "-c", f"printf %s {hostile}"], capture_output=True, text=True, check=True, cwd=folder
    )
    assert echoed.stdout == HOSTILE  # quoted so that the shell takes it as it is
    assert pressed(asked, "everstep device drain n") == ["nvme0", "nvme1"]
    assert pressed(asked, "everstep show res") == ["resnet"]
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.usefixtures("run_names")
def test_fish_completes(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "everstep.fish").write_text(script("fish"))

    def fish(line: str) -> list[str]:
        text = f"source everstep.fish; complete -C '{line}'"
        return [each.split("\t")[0] for each in in_shell(["fish", "--no-config", "-c"], text, folder)]

    assert fish("everstep st") == ["status", "stop"]
    assert fish("everstep device re") == ["readmit", "retire"]
    assert pressed(fish, "everstep show res") == ["resnet"]
    assert "--no-machine" in fish("everstep config check --no")
    assert "nvme1" in pressed(fish, "everstep device drain n")
    assert not (folder / "owned").exists()


ZSH = r"""
zmodload zsh/zpty
zpty -b shell zsh -f -i
zpty -w shell "source $PWD/listing.zsh"
zpty -w -n shell "$LINE"$'\x18'
for i in {1..150}; do [[ -s $PWD/offered ]] && break; sleep 0.1; zpty -r -t shell ignored >/dev/null; done
zpty -d shell
[[ ! -e $PWD/offered ]] || cat $PWD/offered
"""
LISTING = r"""
PS1=; unsetopt prompt_cr prompt_sp
autoload -Uz compinit; compinit -u -D
source $PWD/_everstep.zsh
list-offered() {
    compadd() { local -a offered; builtin compadd -O offered "$@"; (( $#offered )) && print -rl -- $offered >> $PWD/offered }
    _main_complete
}
zle -C list-offered complete-word list-offered; bindkey '^X' list-offered
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.usefixtures("run_names")
def test_zsh_completes(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "_everstep.zsh").write_text(script("zsh"))
    (folder / "listing.zsh").write_text(LISTING)

    def zsh(line: str) -> list[str]:
        (folder / "offered").unlink(missing_ok=True)
        return in_shell(["zsh", "-f", "-c"], f"LINE='{line}'{ZSH}", folder)

    assert pressed(zsh, "everstep st") == ["status", "stop"]
    assert pressed(zsh, "everstep show res") == ["resnet"]
    assert pressed(zsh, "everstep device drain n") == ["nvme0", "nvme1"]
    assert not (folder / "owned").exists()


def test_a_daemon_that_does_not_answer_holds_nobody(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path) as daemon:
        daemon.send_signal(signal.SIGSTOP)
        try:
            assert names_of_runs() == ""
        finally:
            daemon.send_signal(signal.SIGCONT)
    assert names_of_runs() == "", "nor does one that is gone"


def names_of_runs() -> str:
    done = subprocess.run(
        [EVERSTEP, "completion", "--values", "runs"], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
