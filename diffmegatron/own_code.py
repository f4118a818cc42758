"""Import user-defined code, such as a kind of attention or a hook, once and only on request.

Requests are the option ``--import`` and the key ``imports`` of a recipe. Checkpoints and run
directories only record the imports of their run, so reading a run never executes its code.
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
from diffmegatron.files import format_path, read_text, shorten

IMPORTS = "DIFFMEGATRON_IMPORTS"
"""Environment variable with the files and modules of ``--import``, for child processes."""
IMPORTS_KEY = "imports"
"""Key of a recipe with the list of files and modules to import."""


class NotImportedError(UserError):
    """A recorded run needs user-defined code whose import this process did not request."""


def import_requested(names: Iterable[str]) -> None:
    """Import the files and modules of ``--import``, including those given to the parent process.

    An environment variable passes all names on to child processes.
    """
    asked = dict.fromkeys([*requested_imports(), *map(absolute, names)])
    for name in asked:
        import_code(name)
    if asked:
        os.environ[IMPORTS] = os.pathsep.join(asked)


def requested_imports() -> list[str]:
    """Return the names passed to ``--import`` in this process or in its parent process."""
    return [name for name in os.environ.get(IMPORTS, "").split(os.pathsep) if name]


def import_environment() -> dict[str, str]:
    """Return the environment variables that repeat this process's ``--import`` in a job."""
    return {IMPORTS: os.environ[IMPORTS]} if requested_imports() else {}


def absolute(name: str) -> str:
    """Return the absolute path of a file; return the name of a module unchanged.

    A name that ends with ``.py`` or contains a slash is a file.
    """
    is_file = name.endswith(".py") or os.sep in name
    return str(Path(name).absolute()) if is_file else name


def import_code(name: str) -> None:
    """Import a Python file (an absolute path) or a module, unless it is already imported."""
    if is_imported(name):
        return
    module = module_name(name)
    if module == name:
        _run(name, lambda: import_module(name))
        return
    read_text(Path(name))  # Refuse a FIFO, on which Python's import would block.
    spec = spec_from_file_location(module, name)
    if spec is None or spec.loader is None:
        raise UserError(
            f"{format_path(Path(name))} is not a Python file; give one that ends with .py"
        )
    loaded, loader = module_from_spec(spec), spec.loader
    sys.modules[module] = loaded
    try:
        _run(name, lambda: loader.exec_module(loaded))
    except BaseException:
        del sys.modules[module]
        raise


def is_imported(name: str) -> bool:
    """Return whether a file or module is imported in this process."""
    return module_name(name) in sys.modules


def module_name(name: str) -> str:
    """Return the key of a file or module in ``sys.modules``.

    The key of a file has a hash of its path, because several files can share a name.
    """
    if absolute(name) == name and os.sep not in name:
        return name
    path = Path(absolute(name))
    digest = sha256(os.fsencode(path)).hexdigest()[:8]
    return f"{path.stem}_{digest}"


def import_recipe_code(values: Mapping[str, Any]) -> dict[str, Any]:
    """Import the code that a recipe and ``--import`` name.

    Return the recipe with all the names in its key ``imports``, so that checkpoints record them.
    """
    own = values.get(IMPORTS_KEY) or []
    if not isinstance(own, list) or not all(isinstance(each, str) for each in own):
        return dict(values)  # The schema of the recipe reports the wrong type.
    names = list(dict.fromkeys([*requested_imports(), *map(absolute, own)]))
    for name in names:
        import_code(name)
    return {**values, IMPORTS_KEY: names} if names else dict(values)


def require_imported(values: Mapping[str, Any], place: str) -> None:
    """Raise NotImportedError if a recorded run needs code that is not imported in this process.

    ``place`` is the path of the recipe for the error message.
    """
    names = values.get(IMPORTS_KEY)
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and not is_imported(name):
            raise NotImportedError(
                f"{place} belongs to a run with user-defined code, which is imported only on "
                f"request; give diffmegatron --import {shorten(name)} before the command"
            )


def _run(name: str, imported: Any) -> None:
    try:
        imported()
    except UserError:
        raise
    except Exception as error:  # User code may raise anything.
        lines = [
            each.lineno
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename == name
        ]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        place = f" at line {lines[-1]}" if lines else ""
        raise UserError(
            f"--import {shorten(name)} failed{place}: {type(error).__name__}: {shorten(str(error))}"
        ) from error
