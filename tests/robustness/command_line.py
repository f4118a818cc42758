"""The commands of ``diffmegatron`` and their parameters, read from its Typer application."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from diffmegatron.cli import app


class Parameter(NamedTuple):
    """A parameter of a command.

    Attributes:
        name: name of the function's parameter.
        option: ``--name``; empty for a positional argument.
        metavar: name of the value in --help; by default ``name`` in capitals.
        is_path: whether its value is a path or a list of paths.
        is_required: whether the command fails without it.
    """

    name: str
    option: str
    metavar: str
    is_path: bool
    is_required: bool

    def words(self, value: str) -> list[str]:
        """Return the words of the command line that set a value."""
        return [self.option, value] if self.option else [value]


class Command(NamedTuple):
    """A command with its words, such as ``("data", "verify")``, and its parameters in order."""

    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def commands(group: typer.Typer = app, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield every command of a group and of the groups in it."""
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.strip("_").replace("_", "-")
        yield Command((*words, name), tuple(_parameters(command.callback)))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and inner.name is not None
        yield from commands(inner.typer_instance, (*words, inner.name))


def _parameters(function: Any) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        # Some commands get options from the fields of a settings class. These options are added to
        # __signature__ only, so get_type_hints does not find them.
        annotated = get_args(hints.get(name, parameter.annotation))
        info = next(
            (each for each in annotated if isinstance(each, ArgumentInfo | OptionInfo)), None
        )
        if info is None:  # the context of typer
            continue
        option = ""
        if isinstance(info, OptionInfo):
            option = next(iter(info.param_decls or ()), f"--{name.strip('_').replace('_', '-')}")
        kinds = {annotated[0], *get_args(annotated[0])}
        yield Parameter(
            name,
            option,
            info.metavar or name.upper(),
            Path in kinds,
            parameter.default is inspect.Parameter.empty,
        )
