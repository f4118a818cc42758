"""Hook that stops a run by SIGTERM after half of its steps, for ``diffmegatron --import``."""

import os
import signal

from diffmegatron import Hook, register_hook
from diffmegatron.training.run import Run


@register_hook
class StopAtHalf(Hook):
    """Send SIGTERM to this process after half of the run's steps, as a scheduler would."""

    def after_step(self, run: Run) -> None:
        """Send the signal if this step is the one in the middle."""
        if run.step == run.recipe.training.total_steps // 2:
            os.kill(os.getpid(), signal.SIGTERM)
