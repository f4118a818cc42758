"""An invalid parallel layout is refused with one sentence and the nearest valid value, if any."""

import re

import pytest

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from tests.paths import CONFIGS

# This recipe has 28 layers, 12 heads, 12 key-value heads, and batches of 1024 sequences. A sequence
# has 4096 tokens.
RECIPE = CONFIGS / "diff_3b_1t.yaml"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            "training.seq_length=4100 parallel.context=4",
            "training.seq_length 4100 is not a multiple of 2 x parallel.context 4; the nearest "
            "length is 4096, the nearest context-parallel size for this length 5",
        ),
        (
            "training.seq_length=4104 parallel.context=2 parallel.tensor=4 "
            "parallel.sequence_parallel=true",
            "4104 is not a multiple of 2 x parallel.context 2 x parallel.tensor 4; the nearest "
            "length is 4096",
        ),
        (
            "parallel.context=8 parallel.context_communication=ulysses",
            "divides the 12 key-value heads of a tensor-parallel rank among parallel.context 8 "
            "ranks, which leaves a remainder; the nearest size is 6, and 'ring' works with any",
        ),
        (
            "parallel.context=8 training.attention_backend=flash_2call",
            "'flash_2call' needs whole sequences, and parallel.context 8 by 'ring' splits them",
        ),
        ("parallel.context_communication=ring", "give parallel.context of at least 2 or 'auto'"),
        ("parallel.tensor=5", "the nearest tensor-parallel size that divides all it shards is 4"),
        ("parallel.pipeline=3", "the nearest pipeline size that divides it is 2"),
        (
            "parallel.pipeline=4 parallel.virtual_pipeline=5",
            "the nearest number of virtual stages per rank is 7",
        ),
        ("parallel.virtual_pipeline=2", "give parallel.pipeline of at least 2"),
        ("parallel.pipeline=2 parallel.zero_stage=3", "would deadlock; the nearest layouts"),
        ("parallel.pipeline=2 parallel.zero_stage=2", "would not partition the gradients; the"),
        ("recompute.layers=3", "recompute.granularity is 'none'; give 'full'"),
        (
            "recompute.granularity=full recompute.layers=5",
            "does not divide the 28 layers of a virtual pipeline stage into equal groups; the "
            "nearest that does is 4",
        ),
        (
            "recompute.granularity=full recompute.method=block recompute.layers=15 "
            "parallel.pipeline=2",
            "is more than the 14 layers of a virtual pipeline stage; give at most 14",
        ),
    ],
)
def test_an_invalid_layout_is_refused_with_the_nearest_valid_one(overrides, said):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        load_recipe(RECIPE, overrides.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.context=2",
        "parallel.context=6 training.seq_length=4104 parallel.context_communication=ulysses",
        "parallel.context=6 training.seq_length=4104 training.attention_backend=flash_2call",
        "parallel.context=8 training.attention_backend=flash_2call model.baseline=true",
        "parallel.pipeline=4 parallel.virtual_pipeline=7",
        "recompute.granularity=full recompute.layers=4",
        "recompute.granularity=full recompute.method=block recompute.layers=5",
        "parallel.zero_stage=3 parallel.tensor=4 parallel.context=2",
    ],
)
def test_valid_layouts_are_accepted(overrides):
    load_recipe(RECIPE, overrides.split())


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        (
            "parallel.tensor=2 parallel.context=2",
            63,
            "63 ranks do not fill parallel.tensor 2 x parallel.context 2 x parallel.pipeline 1; "
            "start a multiple of 4, the nearest is 64",
        ),
        (
            "parallel.pipeline=4 parallel.virtual_pipeline=7 training.global_batch_size=9",
            12,
            "3 microbatches per data-parallel rank are not a multiple of parallel.pipeline 4, as "
            "parallel.virtual_pipeline 7 needs; the nearest training.global_batch_size that fits "
            "is 12",
        ),
    ],
)
def test_a_wrong_rank_count_is_refused_with_the_nearest_valid_value(overrides, ranks, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load_recipe(RECIPE, overrides.split()).data_parallel(ranks)
