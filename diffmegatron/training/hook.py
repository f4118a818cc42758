"""The base class of hooks, and the registry of hooks from imported code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffmegatron.training.run import Run


class Hook:
    """Base class for code that a run calls before, between and after its steps.

    Pass instances of subclasses to ``train``. At each point every rank calls the same hooks in the
    same order: the run's own (:func:`~diffmegatron.training.builtin_hooks.builtin_hooks`),
    then the user's in the order given. A hook may therefore call collectives, but only outside
    ``if run.parallel_state.is_main``. An exception ends the run; if one rank raises alone, the
    others wait until the launcher or the watchdog ends them.
    """

    def before_training(self, run: "Run") -> None:
        """Run once, after everything is loaded and before the first step of this start."""

    def after_step(self, run: "Run") -> None:
        """Run after step ``run.step``; after a rollback that is the step rolled back to."""

    def after_training(self, run: "Run") -> None:
        """Run after the last step or a stop request, but not after an exception."""


HOOKS: list[type[Hook]] = []
"""Hook classes of imported code, in the order of their registration."""


def register_hook(hook: type[Hook]) -> type[Hook]:
    """Add a hook class, which is created without arguments, to every run; usable as a decorator.

    Meant for code that ``--import`` or a recipe's ``imports`` names, where no Python code can pass
    hooks to ``train``.
    """
    if hook not in HOOKS:
        HOOKS.append(hook)
    return hook
