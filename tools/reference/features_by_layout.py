"""The page of features by parallel layout: accepted or refused, from the checks of the recipe."""

from functools import cache

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from tools.paths import ROOT
from tools.reference.markdown import code, head, joined, table
from tools.reference.refused_layouts import RECIPE, without_place

_INTRODUCTION = f"""\
The table has features of `{RECIPE}` in its rows and layouts in its columns. "yes": `plan` and
`train` accept both together. A number: they print the sentence with this number, before any
training step. [layout_matrix.md](../results/layout_matrix.md) has the combinations that are trained
and compared with one process."""

LAYOUTS = {
    "TP": "parallel.tensor=2",
    "TP + SP": "parallel.tensor=2 parallel.sequence_parallel=true",
    "PP": "parallel.pipeline=2",
    "PP, interleaved": "parallel.pipeline=2 parallel.virtual_pipeline=2",
    "CP, ring": "parallel.context=2 parallel.context_communication=ring",
    "CP, all-gather": "parallel.context=2 parallel.context_communication=all_gather",
    "CP, Ulysses": "parallel.context=2 parallel.context_communication=ulysses",
    "ZeRO 2": "parallel.zero_stage=2",
    "ZeRO 3": "parallel.zero_stage=3",
    "optimizer on the host": "parallel.offload_optimizer=true",
}
FEATURES = (
    "model.attention.kind=softmax",
    "model.attention.kind=diff_v1",
    "model.attention.kind=diff_v2",
    "model.attention.kind=grouped",
    "model.attention.kind=dex",
    "model.attention=[...]",
    "model.attention.window=1024",
    "model.attention.qk_norm=true",
    "model.attention.output_gate=elementwise",
    "model.attention.output_gate=headwise",
    "model.rope_scaling.kind=yarn",
    "model.initialization.scheme=mup",
    "model.tied_embeddings=true",
    "model.lora.rank=8",
    "data.reset_attention_mask=true",
    "training.precision=fp32",
    "training.fp8.recipe=tensorwise",
    "training.z_loss=1e-4",
    "training.loss_chunk=1024",
    "training.offload_activations=true",
    "training.deterministic=true",
    "training.attention_backend=triton",
    "training.attention_backend=flash_2call",
    "training.attention_backend=cudnn_2call",
    "recompute.granularity=selective",
    "recompute.granularity=full",
    "optimizer.kind=muon",
    "optimizer.trainable=[*.mlp.*]",
    "parallel.overlap_gradients=true",
)
# Overrides that a feature needs besides its own, or in place of it.
_MORE = {
    "model.attention.kind=grouped": (
        "model.attention.kind=grouped",
        "model.attention.signal_per_noise=3",
    ),
    "model.attention.kind=dex": (
        "model.attention.kind=dex",
        f"model.attention.selected_heads={[[0]] * 28}",
        "model.attention.annealing_steps=1000",
    ),
    "model.attention=[...]": (
        "model.attention=[{kind: diff_v1, num_heads: 12, layers: 15-28}, "
        "{kind: softmax, num_heads: 24}]",
    ),
    "model.rope_scaling.kind=yarn": (
        "model.rope_scaling={kind: yarn, factor: 16, original_length: 256}",
    ),
    "model.initialization.scheme=mup": (
        "model.initialization={scheme: mup, base_hidden_size: 256}",
    ),
    "model.lora.rank=8": ("model.lora={rank: 8, alpha: 16}",),
    "optimizer.trainable=[*.mlp.*]": ("optimizer.trainable=['*.mlp.*']",),
}


def page() -> str:
    """Return the page docs/reference/features_by_layout.md."""
    sentences: dict[str, int] = {}

    def cell(feature: str, layout: str) -> str:
        problem = refusal(feature, layout)
        if problem is None:
            return "yes"
        return str(sentences.setdefault(problem, len(sentences) + 1))

    rows = [(code(feature), *(cell(feature, layout) for layout in LAYOUTS)) for feature in FEATURES]
    numbered = [f"{number}. {sentence}" for sentence, number in sentences.items()]
    columns = [(name, code(overrides)) for name, overrides in LAYOUTS.items()]
    return joined(
        [
            head("Features by layout", "features_by_layout", _INTRODUCTION),
            table(("feature", *LAYOUTS), rows),
            "\n".join(numbered),
            table(("layout", "overrides"), columns),
        ]
    )


def refusal(feature: str, layout: str) -> str | None:
    """Return the sentence with which a feature is refused in a layout; None if it is accepted.

    Raises:
        AssertionError: if the recipe refuses the feature without the layout.
    """
    overrides = _MORE.get(feature, (feature,))
    alone = _problem(overrides)
    assert alone is None, f"{feature} is refused alone: {alone}"
    return _problem((*overrides, *LAYOUTS[layout].split()))


@cache
def _problem(overrides: tuple[str, ...]) -> str | None:
    try:
        load_recipe(ROOT / RECIPE, overrides)
    except UserError as error:
        return without_place(str(error))
    return None
