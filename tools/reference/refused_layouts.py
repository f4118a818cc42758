"""The page of layouts that a recipe cannot have, from the errors themselves."""

import re
from typing import NamedTuple

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from tools.paths import ROOT
from tools.reference.markdown import code, head, joined, table

RECIPE = "configs/diff_3b_1t.yaml"
_INTRODUCTION = f"""\
`plan` and `train` print these sentences before any training step. Each row has overrides of
`{RECIPE}` (28 layers, 12 heads, sequences of 4,096 tokens, 1,024 of them in a batch) and
the sentence that they cause. [parallelism.md](../parallelism.md) describes how to choose one."""


class Refused(NamedTuple):
    """Overrides that cause an error, on a number of ranks if it depends on them."""

    overrides: str
    ranks: int | None = None


REFUSED = (
    Refused("parallel.zero_stage=2 parallel.pipeline=2"),
    Refused("parallel.zero_stage=3 parallel.pipeline=2"),
    Refused("parallel.sequence_parallel=true"),
    Refused("parallel.virtual_pipeline=2"),
    Refused("parallel.context_communication=ring"),
    Refused("parallel.context=8 parallel.context_communication=ulysses"),
    Refused("parallel.tensor=8"),
    Refused(
        "parallel.context=2 parallel.context_communication=ring "
        "training.attention_backend=flash_2call"
    ),
    Refused("parallel.pipeline=8"),
    Refused("parallel.pipeline=4 parallel.virtual_pipeline=2"),
    Refused("recompute.granularity=full recompute.layers=5"),
    Refused("recompute.granularity=full recompute.method=block recompute.layers=29"),
    Refused("recompute.method=block"),
    Refused("parallel.context=3"),
    Refused("parallel.overlap_gradients=true parallel.pipeline=2"),
    Refused("parallel.overlap_gradients=true parallel.zero_stage=2"),
    Refused("parallel.overlap_gradients=true parallel.offload_optimizer=true"),
    Refused("parallel.pipeline=2 optimizer.trainable=[decoder.layers.0.*]"),
    Refused("parallel.tensor=2", ranks=7),
    Refused("training.micro_batch_size=3", ranks=4),
    Refused(
        "parallel.pipeline=2 parallel.virtual_pipeline=2 training.global_batch_size=12", ranks=8
    ),
)


def page() -> str:
    """Return the page docs/reference/refused_layouts.md."""
    rows = [(f"{code(each.overrides)}{_on(each.ranks)}", sentence(each)) for each in REFUSED]
    parts = [head("Refused layouts", "refused_layouts", _INTRODUCTION)]
    return joined([*parts, table(("overrides", "sentence"), rows)])


def sentence(refused: Refused) -> str:
    """Return the error of overrides.

    Raises:
        AssertionError: if they are accepted.
    """
    try:
        recipe = load_recipe(ROOT / RECIPE, refused.overrides.split())
        if refused.ranks is not None:
            recipe.num_microbatches(refused.ranks)
    except UserError as error:
        return without_place(str(error))
    raise AssertionError(f"{refused.overrides} is accepted")


def without_place(sentence: str) -> str:
    """Return an error without the places of its keys: files, and the command line."""
    place = r"(the command line|\S+\.yaml)"
    return re.sub(rf"^{place}( and {place})*: ", "", sentence)


def _on(ranks: int | None) -> str:
    return "" if ranks is None else f" on {ranks} ranks"
