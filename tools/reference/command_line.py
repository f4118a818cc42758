"""The page of all commands with their options, from the command line itself."""

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from diffmegatron.cli import app
from tools.reference.markdown import code, head, joined, table

_NAME = "diffmegatron"
_INTRODUCTION = """\
`diffmegatron COMMAND --help` prints the same text. `KEY=VALUE` overrides a
[key of a recipe](../keys.md), and `--import` precedes the command.
[exit_statuses.md](exit_statuses.md) lists the exit statuses."""


def page() -> str:
    """Return the page docs/reference/command_line.md."""
    parts = [head("Command line", "command_line", _INTRODUCTION)]
    for name, command in _commands(typer.main.get_command(app), _NAME):
        parts += [f"## {name}", *_described(name, command)]
    return joined(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands in it, with their whole names."""
    inner = getattr(command, "commands", {})
    if not inner or name == _NAME:
        yield name, command
    for last, each in inner.items():
        yield from _commands(each, f"{name} {last}")


def _described(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    yield code(" ".join([name, *command.collect_usage_pieces(context)]))
    yield inspect.cleandoc(command.help or "")
    records = [each.get_help_record(context) for each in command.get_params(context)]
    # Markdown would read [x>=1] as a link.
    rows = [
        (code(words), text.replace("[", "\\["))
        for words, text in filter(None, records)
        if "--help" not in words
    ]
    if rows:
        yield table(("argument or option", "meaning"), rows)
