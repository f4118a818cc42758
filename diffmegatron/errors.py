"""Exceptions whose messages are one sentence for the user."""


class UserError(ValueError):
    """Error for the user, usually a mistake in a recipe, a path, a file or a layout.

    The message is one sentence that names what is wrong, its value and a correct value. The command
    line prints the message without a traceback and exits with ``exit_status``.
    """

    exit_status = 2


class MachineError(UserError):
    """Temporary failure, such as a missing rank; the same command may succeed later.

    Launch scripts restart a job that ended with this ``exit_status``, EX_UNAVAILABLE of sysexits.h.
    """

    exit_status = 69


class UnfitNodeError(MachineError):
    """Failure of one machine; the job may succeed on other machines.

    After this ``exit_status`` (EX_OSERR of sysexits.h), ``launch/slurm.sh`` restarts the job. The
    script excludes this machine if enough others remain.
    """

    exit_status = 71


class NotFiniteError(Exception):
    """NaN or infinity in the results of a model; the message names the quantity, such as a loss."""
