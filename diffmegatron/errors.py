"""Exceptions whose messages are one sentence for the user."""


class UserError(ValueError):
    """An error for the user, usually a mistake in a recipe, a path, a file or a layout.

    The subclass :class:`MachineError` is for failures of machines instead. The message is one
    sentence that names what is wrong, its value and a correct value. The command line prints the
    message without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class MachineError(UserError):
    """A temporary failure, such as a missing rank; the same command may succeed later.

    Launch scripts restart a job that ended with this ``exit_status``. The value is EX_UNAVAILABLE
    of sysexits.h.
    """

    exit_status = 69


class UnfitNodeError(MachineError):
    """A failure of one machine; the job may succeed on other machines.

    After this ``exit_status``, ``launch/slurm.sh`` restarts the job, without this machine if enough
    others remain. The value is EX_OSERR of sysexits.h.
    """

    exit_status = 71


class NotFiniteError(Exception):
    """NaN or infinity in the results of a model; the message names the quantity, such as a loss."""
