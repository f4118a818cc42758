"""A suite of evaluation that runs within training: an entry of ``training.evaluate``."""

from typing import Any

from pydantic import ConfigDict

from diffmegatron.section import Count, Section


class EvaluateConfig(Section):
    """The suite named ``suite``, run every ``every`` steps; other keys are the suite's settings.

    The settings are checked when training starts, because this package must not import evaluation.
    """

    model_config = ConfigDict(extra="allow")

    suite: str
    every: Count

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the suite."""
        return dict(self.model_extra or {})
