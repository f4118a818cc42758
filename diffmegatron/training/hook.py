"""The base class of training hooks, and the registry of user-defined hook classes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffmegatron.training.run import Run


class Hook:
    """Base class for code that a run calls before training, after each step and after training.

    Pass instances to :func:`diffmegatron.train` as ``hooks``. Every rank calls the built-in hooks
    first, then these instances, then the registered hooks (:func:`register_hook`).

    A hook may call collectives, but not inside ``if run.parallel_state.is_main``. An exception in a
    hook ends the run.
    """

    def before_training(self, run: "Run") -> None:
        """Run after a start or resume, when the weights are loaded."""

    def after_step(self, run: "Run") -> None:
        """Run after each step.

        After a rollback by the guard, ``run.step`` is the step of the loaded checkpoint.
        """

    def after_training(self, run: "Run") -> None:
        """Run after the last step, or when a stop request ends the run; not after an exception."""


HOOKS: list[type[Hook]] = []
"""Registered hook classes, in the order of :func:`register_hook` calls."""


def register_hook(hook: type[Hook]) -> type[Hook]:
    """Add a hook class to every run; usable as a class decorator.

    Use it in modules that ``--import`` or the recipe's ``imports`` load. Each call of
    :func:`diffmegatron.train` creates one instance, without arguments, for all stages.
    """
    if hook not in HOOKS:
        HOOKS.append(hook)
    return hook
