"""The page of exit statuses, with the numbers of the code."""

import signal

from diffmegatron.attempts.ends import EXIT_STOPPED
from diffmegatron.errors import MachineError, UnfitNodeError, UserError
from tools.reference.markdown import head, joined, table

_INTRODUCTION = """\
A command ends with 0 if it has done its work. Every error that a user can correct is one sentence
on standard error, with status 2."""


def page() -> str:
    """Return the page docs/reference/exit_statuses.md."""
    wrong, stopped = UserError.exit_status, EXIT_STOPPED
    absent, unfit = MachineError.exit_status, UnfitNodeError.exit_status
    train = [
        (0, "trained, saved and measured", "ends the job"),
        (
            wrong,
            "a mistake in the recipe, the guard stopped the run, the last save failed, or two "
            "jobs in a row ended before a new step",
            "ends the job, because a person must act",
        ),
        (stopped, "stopped by a signal or the time limit, and saved", "requeues the job"),
        (
            absent,
            "ranks did not arrive, or the port was in use",
            "restarts the ranks",
        ),
        (unfit, "the node failed the checks before the attempt", "restarts without the node"),
        (1, "the watchdog ended a rank without progress", "restarts the ranks"),
        ("others", "a crash; 128 + N after signal N", "restarts the ranks"),
    ]
    stop_signals = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    early = ", ".join(f"{128 + number} ({number.name})" for number in stop_signals)
    others = [
        ("data verify, checkpoint verify", 1, "damage was found"),
        ("status", 1, "the job waits, hangs or has disappeared; or a run without a ledger is open"),
        ("status", wrong, "the job has ended unfinished, or the folder has no job"),
        ("preflight", unfit, "this node has a problem that not all nodes have"),
        ("preflight", wrong, "all nodes have a problem"),
        ("attempt end", stopped, "requeue the job"),
        ("attempt end", absent, "begin the next attempt at once"),
        ("attempt end", 1, "ten faults in a row without a new checkpoint"),
        ("launch/torchrun.sh", stopped, "stopped and saved; plain torchrun gives 1"),
        ("every command", wrong, "an error of one sentence"),
        ("every command", 1, "an unexpected error, with a traceback"),
    ]
    return joined(
        [
            head("Exit statuses", "exit_statuses", _INTRODUCTION),
            "## train",
            table(
                ("status of a rank", "meaning", "`launch/slurm.sh`"),
                [(str(status), *rest) for status, *rest in train],
            ),
            f"A rank that a signal ends before it handles signals has {early}. The job script "
            "stops restarting at the tenth fault in a row without a new checkpoint, and ends with "
            "1. [operations.md](../operations.md#how-a-job-ends) explains the decision.",
            "## Other commands",
            table(
                ("command", "status", "meaning"),
                [(command, str(status), text) for command, status, text in others],
            ),
        ]
    )
