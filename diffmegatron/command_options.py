"""Turn the fields of a settings dataclass into the options of a typer command."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, get_type_hints


def with_options(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command one option per field of the dataclass ``kind``.

    The command's function must have a parameter ``settings``, which receives an instance of
    ``kind``. Each field must have the type ``Annotated[..., typer.Option(...)]``.
    """
    types = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=types[field.name],
        )
        for field in fields(kind)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.name != "settings"
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            settings = kind(**{option.name: values.pop(option.name) for option in options})
            command(**values, settings=settings)

        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate
