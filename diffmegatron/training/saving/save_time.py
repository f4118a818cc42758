"""Warnings of a run whose saves take longer than Slurm's KillWait or signal margin allows."""

from diffmegatron.parallel.launcher import LaunchEnvironment


def save_warnings(seconds: float, launch: LaunchEnvironment, margin: float) -> dict[str, str]:
    """What to say about a save of so many seconds, by what it is about; mostly nothing.

    Args:
        seconds: that the save took until it counted.
        launch: what Slurm gives.
        margin: ``checkpoint.time_limit_margin`` in seconds.
    """
    warnings = {}
    if launch.kill_wait is not None and seconds > launch.kill_wait:
        warnings["kill wait"] = too_long_for_kill_wait(seconds, launch.kill_wait)
    lead = max(launch.signal_seconds or 0.0, margin)
    if launch.job_end is not None and 2 * seconds > lead:
        warnings["lead"] = (
            f"a save has taken {seconds:.0f} s, and the run is asked to stop {lead:.0f} s before "
            "the time limit: twice a save is the least; raise checkpoint.time_limit_margin above "
            f"{2 * seconds:.0f}, which counts from the next attempt on"
        )
    return warnings


def too_long_for_kill_wait(seconds: float, kill_wait: float) -> str:
    """The sentence for a save that a SIGTERM leaves no time for."""
    return (
        f"a save has taken {seconds:.0f} s, and {kill_wait:.0f} s after a SIGTERM Slurm kills "
        "(KillWait): to stop the job use scancel --signal=USR1, never scancel alone"
    )
