"""The points of a run at which something else than training may be done."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffmegatron.training.run import Run


class Hook:
    """What a run does beside its steps; subclass it and give it to ``train``.

    At each point every rank calls the same hooks in the same order: those of the run itself
    (:func:`~diffmegatron.training.hooks.builtin_hooks.builtin_hooks`), then the user's as they were
    given. So any hook may call collectives, as long as it does so on every rank; what is behind
    ``run.parallel_state.is_main`` may not. An exception ends the run; a rank that raises alone
    leaves the others waiting until the launcher or the watchdog ends them.
    """

    def before_training(self, run: "Run") -> None:
        """Everything is loaded, and no step of this start is done."""

    def after_step(self, run: "Run") -> None:
        """Step ``run.step`` is done; after a rollback it is the step rolled back to."""

    def after_training(self, run: "Run") -> None:
        """The last step is done, or the run was asked to stop; not after an exception."""


HOOKS: list[type[Hook]] = []
"""Those of imported code, in the order of their registration."""


def register_hook(hook: type[Hook]) -> type[Hook]:
    """Have every run call a hook, which is made without arguments; may decorate the class.

    For code that ``--import`` or a recipe's ``imports`` names: there nobody gives ``train`` hooks.
    """
    if hook not in HOOKS:
        HOOKS.append(hook)
    return hook
