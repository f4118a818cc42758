"""A user's own code, such as a kind of attention or a hook: imported once, where it was asked for.

``--import`` and the key ``imports`` of a recipe ask for it. A checkpoint and a ``run_dir`` name the
code of their run and do not: whoever reads one of somebody else's runs no code of theirs.
"""

import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_text, shown

IMPORTS = "DIFFMEGATRON_IMPORTS"
"""The variable with the names given to ``--import``; processes started by this one have it too."""
KEY = "imports"


class NotImportedError(UserError):
    """A run names code of its own that nobody asked for in this process."""


def ask_for(names: Iterable[str]) -> None:
    """Import what the command line names, for this process and those that it starts.

    Raises:
        UserError: as :func:`import_code`.
    """
    asked = dict.fromkeys([*asked_for(), *map(absolute, names)])
    for name in asked:
        import_code(name)
    if asked:
        os.environ[IMPORTS] = os.pathsep.join(asked)


def asked_for() -> list[str]:
    """Return the names that the command line, or that of the process that started this, gave."""
    return [name for name in os.environ.get(IMPORTS, "").split(os.pathsep) if name]


def asked_variables() -> dict[str, str]:
    """Return the environment in which a job imports what this command line asked for."""
    return {IMPORTS: os.environ[IMPORTS]} if asked_for() else {}


def absolute(name: str) -> str:
    """Return a file's name so that it means the same in every folder; a module's as it is."""
    is_file = name.endswith(".py") or os.sep in name
    return str(Path(name).absolute()) if is_file else name


def import_code(name: str) -> None:
    """Import a Python file, or a module that Python finds, unless it has been.

    Args:
        name: of :func:`absolute`; one that ends with ``.py`` or has a slash is a file's.

    Raises:
        UserError: it cannot be read, or fails; with the line of the file that did.
    """
    if is_imported(name):
        return
    module = module_name(name)
    if module == name:
        _run(name, lambda: import_module(name))
        return
    read_text(Path(name))  # Python would wait for a FIFO.
    spec = spec_from_file_location(module, name)
    if spec is None or spec.loader is None:
        raise UserError(f"{shown(Path(name))} is not a Python file; give one that ends with .py")
    loaded, loader = module_from_spec(spec), spec.loader
    sys.modules[module] = loaded
    try:
        _run(name, lambda: loader.exec_module(loaded))
    except BaseException:
        del sys.modules[module]
        raise


def is_imported(name: str) -> bool:
    """Return whether :func:`import_code`, or Python, has imported it in this process."""
    return module_name(name) in sys.modules


def module_name(name: str) -> str:
    """Return the name in ``sys.modules``: a file's own one, as two folders may have one name."""
    if absolute(name) == name and os.sep not in name:
        return name
    path = Path(absolute(name))
    digest = sha256(os.fsencode(path)).hexdigest()[:8]
    return f"{path.stem}_{digest}"


def import_of_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with all that it imports, after importing it.

    What the command line asked for counts as the recipe's: a checkpoint then names it.

    Raises:
        UserError: as :func:`import_code`.
    """
    own = values.get(KEY) or []
    if not isinstance(own, list) or not all(isinstance(each, str) for each in own):
        return dict(values)  # which checking the recipe refuses
    names = list(dict.fromkeys([*asked_for(), *map(absolute, own)]))
    for name in names:
        import_code(name)
    return {**values, KEY: names} if names else dict(values)


def require_imported(values: Mapping[str, Any], place: str) -> None:
    """Refuse the recipe of a run whose code was not asked for in this process.

    Args:
        values: of the recipe.
        place: its file, for the sentence.

    Raises:
        NotImportedError: it names code that is not imported; with the option that imports it.
    """
    names = values.get(KEY)
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and not is_imported(name):
            raise NotImportedError(
                f"{place} is of a run with code of its own, which runs only when it is asked for; "
                f"give diffmegatron --import {clipped(name)} before the command"
            )


def _run(name: str, imported: Any) -> None:
    try:
        imported()
    except UserError:
        raise
    except Exception as error:  # of the user's code, which may raise anything
        lines = [
            each.lineno
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename == name
        ]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        place = f" at line {lines[-1]}" if lines else ""
        raise UserError(
            f"--import {clipped(name)} failed{place}: {type(error).__name__}: {clipped(str(error))}"
        ) from error
