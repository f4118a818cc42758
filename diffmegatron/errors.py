"""Exceptions whose messages are one sentence for the user."""


class UserError(ValueError):
    """A mistake in the input: a recipe, a path, a file, a layout.

    The message is one sentence that names the thing, its value and a correct value. The command
    line prints it without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class MachineError(UserError):
    """A temporary failure, such as a missing rank; the same command may succeed later.

    Launch scripts restart the job on this exit status (EX_UNAVAILABLE of sysexits.h).
    """

    exit_status = 69


class UnfitNodeError(MachineError):
    """This machine cannot take part in the run, others can (EX_OSERR of sysexits.h)."""

    exit_status = 71


class NotFiniteError(Exception):
    """A model computed NaN or infinity; the message names the place."""
