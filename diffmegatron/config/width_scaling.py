"""Maximal update parametrization (muP): initial values and learning rates that depend on the width.

A network m times as wide as a base network then learns with the settings of the base network (Yang
et al., arXiv 2203.03466, table 8, as ``use_mup`` of Megatron-core 0.19). The factors follow from
one condition. Copy the base network's channels m times, and divide each weight between copied
channels by m. The wide network has the outputs of the base network, and must keep them through all
steps of AdamW. tests/unit/optim/test_width_scaling.py trains such pairs.

With m = ``hidden_size`` / ``base_hidden_size`` and r = ``head_dim`` / ``base_head_dim``:

    tensor                                                 initial values   rate      eps
    matrices of layers: projections, MLP, W_lambda, gates  1 / sqrt(m)      1 / m     1 / m
    embedding, output layer                                1                1         1 / m
    norms of hidden states, biases                         1                1         1 / m
    final norm                                             1 / m            1 / m     1 / m
    norms of queries, lambda vectors of a layer            1 / sqrt(r)      as that   1
    norms of keys and of heads                             1                1         1

Megatron-core divides the logits by m. The row of the final norm has the same effect: AdamW trains a
weight that begins at 1 / m with the rate / m exactly as a weight of 1 whose product is divided by
m. Its gradient is divided by m too (model/trainable.py), so that both also have the same norm. The
row of the norms of queries likewise replaces the softmax scale sqrt(base_head_dim) /
head_dim. The network therefore needs no multipliers, and its exports, imports and evaluation do not
depend on this module.

"eps" is the factor of AdamW's eps and of the tensor's gradients, without powers of r. The weight
decay of a step, which is the learning rate times ``weight_decay``, is the same at every width, as
in the authors' package ``mup``.
"""

from typing import NamedTuple

from diffmegatron.attention.kinds.layer import QK_NORMS, QKV_BIAS
from diffmegatron.attention.kinds.two_maps import LAMBDA_VECTORS
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.tensors import FINAL_NORM, NamedTensor


class WidthFactors(NamedTuple):
    """Factors of a tensor, relative to a network of the base width.

    Attributes:
        initial: factor of the initial values.
        rate: factor of AdamW's learning rate.
        epsilon: factor of AdamW's eps.
    """

    initial: float = 1.0
    rate: float = 1.0
    epsilon: float = 1.0


def width_ratio(model: ModelConfig) -> float:
    """Return m, the hidden size divided by the base network's; 1 without muP."""
    return model.hidden_size / (model.initialization.base_hidden_size or model.hidden_size)


def width_factors(tensor: NamedTensor, model: ModelConfig) -> WidthFactors:
    """Return the factors of a tensor with its full name; all are 1 without muP."""
    if model.initialization.scheme != "mup":
        return WidthFactors()
    m = width_ratio(model)
    r = model.attention.head_dim / (model.initialization.base_head_dim or model.attention.head_dim)
    _, is_attention, name = tensor.name.rpartition(".self_attention.")
    if tensor.is_matrix:
        return WidthFactors(m**-0.5, 1 / m, 1 / m)
    if tensor.name == FINAL_NORM:
        return WidthFactors(1 / m, 1 / m, 1 / m)
    if name in (QK_NORMS[0], *LAMBDA_VECTORS):
        return WidthFactors(r**-0.5, r**-0.5)
    if is_attention and name != QKV_BIAS:
        return WidthFactors()
    return WidthFactors(epsilon=1 / m)


def matrix_rate(recipe: RecipeSections) -> float:
    """Return the factor of the learning rate for matrices of layers; 1 without muP.

    The change of an output must not depend on the width. The entries of AdamW's update do not, and
    their products add up over the inputs, so the factor is 1 / m. The singular values of Muon's
    update are equal. They grow with sqrt(m) for ``muon.scale: rms``, and not for ``spectral``.
    """
    m = width_ratio(recipe.model)
    if recipe.optimizer.kind == "adamw":
        return 1 / m
    return m**-0.5 if recipe.optimizer.muon.scale == "rms" else 1.0


def scaling_in_words(recipe: RecipeSections) -> str | None:
    """Return the factors of the matrices of layers, as ``plan`` prints them; None without muP."""
    if recipe.model.initialization.scheme != "mup":
        return None
    ratio, rate = width_ratio(recipe.model), matrix_rate(recipe)
    return f"std x {ratio**-0.5:.3g}, lr x {rate:.3g} ({ratio:g} base widths)"


def check_width_scaling(recipe: RecipeSections) -> None:
    """Raise ValueError if muP does not fit the other settings."""
    model, base_head_dim = recipe.model, recipe.model.initialization.base_head_dim
    if model.initialization.scheme != "mup":
        return
    scheme = "model.initialization.scheme is 'mup', which scales a network that begins at random, "
    if model.attention.foundation is not None:
        raise ValueError(
            f"{scheme}and kind {model.attention.kind!r} extends a pretrained one; give 'scaled'"
        )
    if model.lora is not None:
        raise ValueError(f"{scheme}and model.lora adapts a pretrained one; give 'scaled'")
    if recipe.optimizer.kind == "muon" and recipe.optimizer.muon.per_head:
        raise ValueError(
            "model.initialization.scheme is 'mup' and optimizer.muon.per_head is true; one matrix "
            "per head needs another learning rate than the other matrices, so give false"
        )
    for kind in model.attention.kinds:
        names = {each.name for each in kind.parameters(model.hidden_size)}
        if base_head_dim not in (None, kind.head_dim) and not names.issuperset(QK_NORMS):
            raise ValueError(
                f"model.initialization.base_head_dim is {base_head_dim} and head_dim of kind "
                f"{kind.kind!r} is {kind.head_dim}; the weight of the queries' norm carries the "
                "scale of the scores, so set model.attention.qk_norm, or keep head_dim and give "
                "more heads"
            )
