"""The base class of training hooks, and the registry of hook classes from imported code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffmegatron.training.run import Run


class Hook:
    """Base class for code that a run calls before, between and after its steps.

    Pass instances of subclasses to :func:`~diffmegatron.training.trainer.train` as the argument
    ``hooks``. A run calls its hooks in this order:

    1. The built-in hooks (:func:`~diffmegatron.training.builtin_hooks.builtin_hooks`).
    2. The hooks in the argument ``hooks``. :func:`diffmegatron.api.train` appends the registered
       hooks (:func:`register_hook`) to this argument.

    The order is the same on every rank, so a hook may call collectives, but not inside
    ``if run.parallel_state.is_main``, because then only rank 0 would call them.

    An exception in a hook ends the run. If only one rank raises, the other ranks wait until the
    launcher or the watchdog ends them.
    """

    def before_training(self, run: "Run") -> None:
        """Run once after each start or resume.

        The weights are already loaded, and the first step has not begun.
        """

    def after_step(self, run: "Run") -> None:
        """Run after each step.

        ``run.step`` is the number of the step. The guard, which checks losses and gradient norms,
        may have returned the run to a checkpoint after this step. ``run.step`` is then the step of
        the checkpoint.
        """

    def after_training(self, run: "Run") -> None:
        """Run after the last step, or when a stop request ends the run; not after an exception."""


HOOKS: list[type[Hook]] = []
"""Registered hook classes, in the order of :func:`register_hook` calls."""


def register_hook(hook: type[Hook]) -> type[Hook]:
    """Add a hook class to every run; usable as a class decorator.

    Each run creates an instance of the class without arguments. The decorator is for modules that
    are loaded with ``--import`` or the recipe's ``imports``, because a run from the command line
    cannot pass the argument ``hooks``.
    """
    if hook not in HOOKS:
        HOOKS.append(hook)
    return hook
