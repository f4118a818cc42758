"""An evaluation suite that runs during training: an entry of ``training.evaluate``."""

from typing import Any

from pydantic import ConfigDict

from diffmegatron.section import Count, Section


class EvaluateConfig(Section):
    """Evaluation of a run with the suite (benchmark) ``suite`` every ``every`` steps.

    Other keys are settings of the suite. They are checked when training starts, because ``config``
    must not import ``evaluation``.
    """

    model_config = ConfigDict(extra="allow")

    suite: str
    every: Count

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the suite: all keys except ``suite`` and ``every``."""
        return dict(self.model_extra or {})
