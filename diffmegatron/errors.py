"""Exceptions whose messages are one sentence for the user."""


class UserError(ValueError):
    """Error that the user can correct, usually in a recipe, a path, a file or a layout.

    Functions may raise this error without naming it in their docstrings. The command line prints
    the message, one sentence, without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class MachineError(UserError):
    """Temporary failure, such as a missing rank; the same command may succeed later.

    Launch scripts restart the job. The ``exit_status`` is EX_UNAVAILABLE of sysexits.h.
    """

    exit_status = 69


class UnfitNodeError(MachineError):
    """Failure of one machine; the job may succeed on others.

    ``launch/slurm.sh`` restarts the job without this machine if enough others remain. The
    ``exit_status`` is EX_OSERR of sysexits.h.
    """

    exit_status = 71


class NotFiniteError(Exception):
    """NaN or infinity in the results of a model; the message names the quantity, such as a loss."""
