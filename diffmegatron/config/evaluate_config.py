"""A suite of evaluation that runs within training: an entry of ``training.evaluate``."""

from typing import Any

from pydantic import ConfigDict

from diffmegatron.section import Count, Section


class EvaluateConfig(Section):
    """``suite`` every so many steps; the other keys are the suite's settings.

    These are checked when training starts: evaluation stands above the recipe.
    """

    model_config = ConfigDict(extra="allow")

    suite: str
    every: Count

    @property
    def settings(self) -> dict[str, Any]:
        """Of the suite."""
        return dict(self.model_extra or {})
