"""Tests of the checks of a recipe's section ``model.rope_scaling``."""

import pytest
from pydantic import ValidationError

from diffmegatron.config.model_config import RopeScaling

YARN = {"kind": "yarn", "factor": 4.0, "original_length": 4096}
REFUSED = {
    "another kind's key": (
        {"kind": "linear", "factor": 2.0, "beta_fast": 16.0},
        r"beta_fast belongs to kind 'yarn' and model\.rope_scaling\.kind is 'linear'",
    ),
    "llama3's key": (YARN | {"low_freq_factor": 2.0}, "low_freq_factor belongs to kind 'llama3'"),
    "no length": ({"kind": "yarn", "factor": 4.0}, "'yarn' needs original_length"),
    "one mscale": (YARN | {"mscale": 1.0}, "give both or neither"),
    "two factors": (
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
        "attention_factor 1 replaces mscale",
    ),
    "betas": (YARN | {"beta_slow": 32.0}, r"beta_slow 32 is not below .*beta_fast 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_without_effect_are_refused(case):
    section, message = REFUSED[case]
    with pytest.raises(ValidationError, match=message):
        RopeScaling.model_validate(section)


def test_a_stored_section_loads_again():
    """Check that a section which was saved with all keys is equal after it is loaded."""
    for section in (YARN, {"kind": "linear", "factor": 2.0}, {"kind": "llama3", "factor": 8.0}):
        scaling = RopeScaling.model_validate(section)
        assert RopeScaling.model_validate(scaling.model_dump()) == scaling
