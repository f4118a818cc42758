"""The exceptions that are one sentence for whoever runs the program."""


class UserError(ValueError):
    """A mistake in the input: a recipe, a path, a file, a layout.

    The message is one sentence that names the thing, its value and what would be right. The CLI
    prints it without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class MachineError(UserError):
    """Nobody's mistake, and the same command may succeed later: a rank that did not arrive.

    Launch scripts start again upon it (EX_UNAVAILABLE of sysexits.h).
    """

    exit_status = 69


class UnfitNodeError(MachineError):
    """This machine is not fit for a run that the others are fit for (EX_OSERR of sysexits.h)."""

    exit_status = 71


class NotFiniteError(Exception):
    """A model gave NaN or infinity; the message says where."""
