"""`everstep config`: check, show and reload the daemon's configuration."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError, DaemonUnavailableError, EverstepError, NotFoundError, UsageError
from ...core.paths import data_socket_path
from ..config import DaemonConfig, resolve_config
from ..configuration.fit import look_at_machine
from ..configuration.fit_plan import Misfit, misfits
from ..configuration.keys_plan import key_text, values_in
from ..configuration.layers_plan import DEFAULT, Problem
from ..configuration.reloader import Reloaded
from ..configuration.sources import ConfigSources
from ..configuration.toml_format import document, values_shown
from .config_arguments import flags_of
from .output import EXIT_DONE, EXIT_FAILED, Output

if TYPE_CHECKING:
    from rich.console import Console

NO_DAEMON = "name a file, or set EVERSTEP_SOCKET to the daemon's socket"


def run(arguments: argparse.Namespace) -> int:
    """Carry out `everstep config WHAT`."""
    parts = {"check": _check, "show": _show, "reload": _reload}
    return parts[arguments.part](arguments)


def _check(arguments: argparse.Namespace) -> int:
    path = arguments.file or Path(_ask(dry_run=True).file or _no_file())
    if not path.exists():
        raise NotFoundError(f"there is no file {path}", hint="name the daemon's configuration (TOML)")
    sources = _sources(path, arguments)
    resolved = resolve_config(sources)
    found = [] if resolved.config is None or arguments.no_machine else _misfits(path, resolved.config)
    is_wrong = bool(resolved.problems) or any(each.is_fatal for each in found)
    names = {key_text(key): place for key, place in resolved.origins.items()}
    answer = {
        "file": str(path),
        "verdict": "fail" if is_wrong else "warn" if found else "ok",
        "problems": resolved.problems,
        "machine": [_placed(each, names) for each in found],
    }
    Output(as_json=arguments.json).show(
        answer, lambda console: _draw(console, path, resolved.problems, found, names)
    )
    return EXIT_FAILED if is_wrong else EXIT_DONE


def _misfits(path: Path, config: DaemonConfig) -> list[Misfit]:
    from . import doctor  # noqa: PLC0415  the engines are slow to import
    from .doctor_plan import Health, judge_directories  # noqa: PLC0415

    values = values_in(config, DaemonConfig)
    facts = look_at_machine(path, values, daemon_runs=_answers(config.socket_path()))
    found = misfits(
        facts,
        reserve_bytes=config.memory.reserve_bytes,
        arena_max_bytes=config.memory.arena_max_bytes,
        cache_max_bytes=config.memory.cache_max_bytes,
    )
    found += _unknown_users(config)
    names = {directory: name for name, directory in config.devices.items()}
    looked = doctor.look_at_directories([Path(each) for each in config.devices.values()])
    real = {facts.path: name for facts, name in zip(looked, config.devices, strict=True)}
    for finding in judge_directories(looked):
        if finding.health is not Health.OK:
            name = names.get(finding.place) or real[finding.place]
            said = f"{finding.check}: {finding.found}"
            is_fatal = finding.health is Health.FAIL
            found.append(Misfit(key=f"devices.{name}", is_fatal=is_fatal, found=said, advice=finding.advice))
    return found


def _unknown_users(config: DaemonConfig) -> list[Misfit]:
    from ..access.served_users import uids_of  # noqa: PLC0415  as the doctor

    try:
        uids_of(config.daemon.users)
    except ConfigError as error:
        said = error.message.removeprefix("daemon.users: ")
        return [Misfit(key="daemon.users", is_fatal=True, found=said, advice=error.hint)]
    return []


def _answers(socket_path: Path) -> bool:
    """Tell whether a daemon listens there already."""
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    try:
        with connected(socket_path):
            return True
    except EverstepError:
        return False


def _placed(misfit: Misfit, places: Mapping[str, str]) -> dict[str, object]:
    return {
        "place": places.get(misfit.key, ""),
        "key": misfit.key,
        "is_fatal": misfit.is_fatal,
        "found": misfit.found,
        "advice": misfit.advice,
    }


def _draw(
    console: "Console",
    path: Path,
    problems: Sequence[Problem],
    found: Sequence[Misfit],
    places: Mapping[str, str],
) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    def line(word: str, style: str, said: str, advice: str) -> None:
        console.print(Text(f"{word:<4}  ", style) + Text(said, "default"), soft_wrap=True)
        if advice:
            console.print(Text(f"      -> {advice}", "dim"), soft_wrap=True)

    for problem in problems:
        line("fail", "bold red", f"{problem.place}: {problem.message}", problem.hint)
    for each in found:
        place = f"{places[each.key]}: " if each.key in places else ""
        what = f"{each.key}: " if each.key else ""
        word, style = ("fail", "bold red") if each.is_fatal else ("warn", "yellow")
        line(word, style, f"{place}{what}{each.found}", each.advice)
    if not problems and not found:
        line("ok", "green", f"{path}: nothing is wrong", "")


def _show(arguments: argparse.Namespace) -> int:
    if arguments.file is None:
        if arguments.settings:
            raise UsageError("--set needs a file", hint="without one it is what the daemon runs with")
        answer = _ask(dry_run=True)
        title, values = answer.file or "a private daemon", answer.values
    else:
        resolved = resolve_config(_sources(arguments.file, arguments))
        given = values_in(resolved.taken(), DaemonConfig)
        title, values = str(arguments.file), values_shown(given, resolved.origins, DEFAULT)
    if not arguments.defaults:
        values = tuple(value for value in values if value.origin != DEFAULT)
    if arguments.json:
        listed = [
            {"key": key_text(each.path), "value": each.text or None, "origin": each.origin} for each in values
        ]
        Output(as_json=True).show({"file": title, "values": listed}, lambda _: None)
    else:
        print(f"# {title}\n\n{document(values, with_origin=arguments.origin)}", end="")
    return EXIT_DONE


def _reload(arguments: argparse.Namespace) -> int:
    done = _ask(dry_run=arguments.dry_run)
    if arguments.dry_run and not done.file:
        _no_file()
    answer = {
        "file": done.file,
        "is_dry_run": arguments.dry_run,
        "changes": done.changes,
        "problem": done.problem,
        "hint": done.hint,
    }
    Output(as_json=arguments.json).show(
        answer, lambda console: _draw_reload(console, done, is_dry_run=arguments.dry_run)
    )
    return EXIT_FAILED if done.problem else EXIT_DONE


def _draw_reload(console: "Console", done: Reloaded, *, is_dry_run: bool) -> None:
    if done.problem:
        console.print(f"nothing would change: {done.problem}", soft_wrap=True, markup=False)
        console.print(f"  {done.hint}", soft_wrap=True, markup=False)
        return
    verb = "would change" if is_dry_run else "changed"
    if not done.changes:
        console.print(f"{done.file}: nothing {verb}", soft_wrap=True, markup=False)
    for each in done.changes:
        console.print(f"{verb}  {each}  ({each.takes_effect})", soft_wrap=True, markup=False)


def _ask(*, dry_run: bool) -> Reloaded:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    with connected(data_socket_path(), hint=NO_DAEMON) as client:
        return client.reload_config(dry_run=dry_run)


def _no_file() -> str:
    raise DaemonUnavailableError("the daemon that answers is private and has no file", hint=NO_DAEMON)


def _sources(path: Path, arguments: argparse.Namespace) -> ConfigSources:
    return ConfigSources(path=path, environment=os.environ, flags=flags_of(arguments))
