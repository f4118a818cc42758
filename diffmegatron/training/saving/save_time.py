"""Warnings about saves that take too long for Slurm's time limits (no import of torch).

There are two limits:

1. After a SIGTERM, Slurm waits KillWait seconds and then sends SIGKILL.
2. Some time before the end of a job, the run stops, by itself or by a stop signal from Slurm. It
   must save before the job ends.
"""

from diffmegatron.parallel.launcher import LaunchEnvironment


def save_warnings(seconds: float, launch: LaunchEnvironment, margin: float) -> dict[str, str]:
    """Return the warnings about a save that took too long for Slurm's time limits.

    There is no message about a limit that is None in ``launch``.

    Args:
        seconds: duration of the save.
        margin: ``checkpoint.time_limit_margin`` in seconds.

    Returns:
        Dict with at most two messages. The key "kill wait" is present if the save took longer than
        KillWait. The key "lead" is present if the save took longer than half of the time between
        the stop of the run and the end of the job.
    """
    warnings = {}
    if launch.kill_wait is not None and seconds > launch.kill_wait:
        warnings["kill wait"] = too_long_for_kill_wait(seconds, launch.kill_wait)
    lead = max(launch.signal_seconds or 0.0, margin)
    if launch.job_end is not None and 2 * seconds > lead:
        warnings["lead"] = (
            f"a save has taken {seconds:.0f} s, and the run stops {lead:.0f} s before the time "
            "limit, which must be at least twice a save; raise checkpoint.time_limit_margin above "
            f"{2 * seconds:.0f}, which applies from the next attempt on"
        )
    return warnings


def too_long_for_kill_wait(seconds: float, kill_wait: float) -> str:
    """Return the warning about a save that takes longer than KillWait (both in seconds)."""
    return (
        f"a save has taken {seconds:.0f} s, and {kill_wait:.0f} s after a SIGTERM Slurm kills "
        "(KillWait): to stop the job use scancel --signal=USR1, never scancel alone"
    )
