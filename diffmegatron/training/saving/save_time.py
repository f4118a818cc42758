"""Warnings about saves that take too long for Slurm's time limits (no import of torch)."""

from diffmegatron.parallel.launcher import LaunchEnvironment


def save_warnings(seconds: float, launch: LaunchEnvironment, margin: float) -> dict[str, str]:
    """Return the warnings about a save that took too long for Slurm's time limits, by name.

    "kill wait": the save took longer than KillWait, the time between SIGTERM and SIGKILL. "lead":
    the save took longer than half of the time between the stop of the run and the end of the job.

    Args:
        seconds: duration of the save.
        margin: ``checkpoint.time_limit_margin`` in seconds.
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
