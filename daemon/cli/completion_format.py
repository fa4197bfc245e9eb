"""The completion scripts of the shells, written from the tree of commands. Pure."""

from collections.abc import Iterable

from .command_tree import Argument, Command, ValueKind

PROGRAM = "everstep"
_ASKED = (ValueKind.RUNS, ValueKind.TAGS, ValueKind.DEVICES)
"""What the daemon is asked for."""


def script(shell: str, root: Command) -> str:
    """Return the script of `bash`, `zsh` or `fish`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](root)


def _words(command: Command) -> list[str]:
    """Return what may stand next: parts, options, fixed choices."""
    words = [part.path[-1] for part in command.parts]
    for argument in command.arguments:
        words += argument.flags or argument.choices
    return words


def _kinds(command: Command) -> list[ValueKind]:
    """Return what the words by place of a command are."""
    found = dict.fromkeys(each.kind for each in command.arguments if not each.flags)
    found.pop(ValueKind.NOTHING, None)
    if ValueKind.RUNS in found:
        found[ValueKind.DIRECTORIES] = None
    return list(found)


def _valued(command: Command) -> list[Argument]:
    return [each for each in command.arguments if each.flags and each.metavar]


def _paths(root: Command) -> Iterable[str]:
    return (each.name for each in root.all() if each.path)


def _bash_offer(kinds: Iterable[ValueKind]) -> str:
    calls = {ValueKind.DIRECTORIES: "_everstep_files -d", ValueKind.FILES: "_everstep_files -f"}
    return "; ".join(calls.get(kind) or f"_everstep_known {kind.value}" for kind in kinds)


def _bash(root: Command) -> str:
    steps = "|".join(f'"{"/".join(each.split())}"' for each in _paths(root))
    lines = [
        "# bash completion for everstep; written by `everstep completion bash`",
        "_everstep_known() {  # runs, tags or devices, as the daemon knows them",
        "    local known",
        "    while IFS= read -r known; do",
        '        [[ $known == "$current"* ]] && COMPREPLY+=("$(printf %q "$known")")',
        f'    done < <({PROGRAM} completion --values "$1" 2>/dev/null)',
        "}",
        "_everstep_files() {  # -d: directories, -f: files",
        "    compopt -o filenames 2>/dev/null",
        "    local found",
        "    while IFS= read -r found; do",
        '        COMPREPLY+=("$found")',
        '    done < <(compgen "$1" -- "$current")',
        "}",
        "_everstep_words() {",
        "    local word",
        '    for word in "$@"; do',
        '        [[ $word == "$current"* ]] && COMPREPLY+=("$word")',
        "    done",
        "}",
        "_everstep() {",
        '    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} path="" index',
        "    COMPREPLY=()",
        "    for ((index = 1; index < COMP_CWORD; index++)); do",
        '        case "${path:+$path/}${COMP_WORDS[index]}" in',
        f'            {steps}) path="${{path:+$path/}}${{COMP_WORDS[index]}}" ;;',
        "        esac",
        "    done",
        '    case "$path:$before" in',
    ]
    for command in root.all():
        for argument in _valued(command):
            offer = (
                f"_everstep_words {' '.join(argument.choices)}"
                if argument.choices
                else _bash_offer([argument.kind] if argument.kind is not ValueKind.NOTHING else [])
            )
            names = "|".join(f'"{"/".join(command.path)}:{flag}"' for flag in argument.flags)
            lines.append(f"        {names}) {offer or ':'}; return ;;")
    lines += ["    esac", '    case "$path" in']
    for command in root.all():
        offers = [f"_everstep_words {' '.join(_words(command))}"]
        if _kinds(command):
            offers.append(f"[[ $current == -* ]] || {{ {_bash_offer(_kinds(command))}; }}")
        lines.append(f'        "{"/".join(command.path)}") {"; ".join(offers)} ;;')
    lines += ["    esac", "}", f"complete -F _everstep {PROGRAM}", ""]
    return "\n".join(lines)


def _zsh_offer(kinds: Iterable[ValueKind]) -> str:
    calls = {ValueKind.DIRECTORIES: "_files -/", ValueKind.FILES: "_files"}
    return "; ".join(calls.get(kind) or f"_everstep_known {kind.value}" for kind in kinds)


def _zsh(root: Command) -> str:
    steps = "|".join("/".join(each.split()) for each in _paths(root))
    lines = [
        f"#compdef {PROGRAM}",
        "# zsh completion for everstep; written by `everstep completion zsh`",
        "_everstep_known() {  # runs, tags or devices, as the daemon knows them",
        "    local -a known",
        f'    known=("${{(@f)$({PROGRAM} completion --values $1 2>/dev/null)}}")',
        "    known=(${known:#})",
        '    (( $#known )) && compadd -- "${known[@]}"',
        "}",
        "_everstep() {",
        '    local path_="" word',
        "    for word in ${words[2,CURRENT-1]}; do",
        '        case "${path_:+$path_/}$word" in',
        f'            {steps}) path_="${{path_:+$path_/}}$word" ;;',
        "        esac",
        "    done",
        '    case "$path_:${words[CURRENT-1]}" in',
    ]
    for command in root.all():
        for argument in _valued(command):
            offer = (
                f"compadd -- {' '.join(argument.choices)}"
                if argument.choices
                else _zsh_offer([argument.kind] if argument.kind is not ValueKind.NOTHING else [])
            )
            names = "|".join(f"{'/'.join(command.path)}:{flag}" for flag in argument.flags)
            lines.append(f"        {names}) {offer or ':'}; return ;;")
    lines += ["    esac", '    case "$path_" in']
    for command in root.all():
        offers = [f"compadd -- {' '.join(_words(command))}"]
        if _kinds(command):
            offers.append(f"[[ $PREFIX == -* ]] || {{ {_zsh_offer(_kinds(command))} }}")
        pattern = "/".join(command.path) or '""'
        lines.append(f"        {pattern}) {'; '.join(offers)} ;;")
    lines += [
        "    esac",
        "}",
        'if [[ $funcstack[1] == _everstep ]]; then _everstep "$@"; else compdef _everstep everstep; fi',
        "",
    ]
    return "\n".join(lines)


def _fish(root: Command) -> str:
    names = " ".join(_fish_quoted("/".join(each.split())) for each in _paths(root))
    lines = [
        "# fish completion for everstep; written by `everstep completion fish`",
        "function __everstep_at",
        "    set -l at",
        "    for word in (commandline -opc)[2..-1]",
        "        set -l next (string join / $at $word)",
        f"        if contains -- $next {names}",
        "            set at $next",
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
        f"complete -c {PROGRAM} -f",
    ]
    for command in root.all():
        at = f"complete -c {PROGRAM} -n {_fish_quoted('__everstep_at ' + _fish_quoted('/'.join(command.path)))}"
        lines += [f"{at} -a {part.path[-1]} -d {_fish_quoted(part.summary)}" for part in command.parts]
        for argument in command.arguments:
            lines.append(f"{at}{_fish_argument(argument)}")
        if ValueKind.RUNS in _kinds(command):
            lines.append(f"{at} -a {_fish_quoted('(__fish_complete_directories)')}")
    return "\n".join(lines) + "\n"


def _fish_argument(argument: Argument) -> str:
    values = {
        ValueKind.DIRECTORIES: "(__fish_complete_directories)",
        ValueKind.FILES: "(__fish_complete_path)",
        ValueKind.NOTHING: "",
    }
    offered = " ".join(argument.choices) or values.get(argument.kind)
    if offered is None:
        offered = f"({PROGRAM} completion --values {argument.kind.value} 2>/dev/null)"
    given = f" -a {_fish_quoted(offered)}" if offered else ""
    if not argument.flags:
        return given or " -a ''"
    flags = "".join(
        f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in argument.flags
    )
    needs = " -x" if argument.metavar else ""
    return f"{flags}{needs}{given} -d {_fish_quoted(argument.help)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
