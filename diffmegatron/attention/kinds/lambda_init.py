"""The initial value of lambda in each layer."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from diffmegatron.section import Section


class LambdaInit(Section):
    """The policy of lambda_init (Ye et al., ICLR 2025, section 2.1 and the ablations of 3.8).

    ``exponential`` is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l, counted from 1. ``constant`` is
    ``value`` in every layer.
    """

    policy: Literal["exponential", "constant"] = Field(
        default="exponential", description="exponential: 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l"
    )
    value: float | None = Field(default=None, gt=0, lt=1, description="constant lambda_init")

    @model_validator(mode="after")
    def _value_belongs_to_constant(self) -> Self:
        if (self.policy == "constant") != (self.value is not None):
            raise ValueError(
                f"model.attention.lambda_init.value is {self.value} with policy {self.policy!r}; "
                "give a value with 'constant' and none with 'exponential'"
            )
        return self

    def of_layer(self, number: int) -> float:
        """Return lambda_init of layer ``number``, counted from 1 over all pipeline stages."""
        if self.value is not None:
            return self.value
        return 0.8 - 0.6 * math.exp(-0.3 * (number - 1))
