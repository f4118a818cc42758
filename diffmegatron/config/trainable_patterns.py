"""Patterns of tensor names, which select the trained tensors and scale their learning rates."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.tensors import (
    LORA_A,
    LORA_B,
    NamedTensor,
    in_layer,
    layer_tensors,
    network_tensors,
    outer_tensors,
    stage_tensors,
)
from diffmegatron.files import shorten

# Limit for recipes with patterns or LoRA, because every pattern is compared with every tensor.
MAX_LAYERS = 1024


def trains_everything(recipe: RecipeSections) -> bool:
    """Return whether a recipe has neither ``trainable`` patterns nor LoRA."""
    return recipe.optimizer.trainable is None and recipe.model.lora is None


def trained_parts(tensor: NamedTensor, recipe: RecipeSections) -> tuple[str, ...]:
    """Return which fused parts of a tensor (q, k, v and g of ``linear_qkv``) are trained.

    The result is ("",) for a trained tensor that is not fused, and () for a frozen tensor.
    """
    parts = _parts(tensor)
    if trains_everything(recipe) or is_lora(tensor.name):
        return parts
    return _matched_parts(tensor.name, parts, recipe.optimizer.trainable or ())


# Cached, because `plan --search` repeats the same calls for thousands of layouts.
@lru_cache(maxsize=2**14)
def _matched_parts(name: str, parts: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in parts if any(_matches(each, name, part) for each in patterns))


def is_trained(recipe: RecipeSections, name: str) -> bool:
    """Return whether a tensor with this name is trained in at least one layer.

    The name may lack its prefix, such as ``decoder.layers.N.``.
    """
    return trains_everything(recipe) or any(
        f".{each.name}".endswith(f".{name}") and trained_parts(each, recipe)
        for each in network_tensors(recipe.model)
    )


def frozen_parts(tensor: NamedTensor, recipe: RecipeSections) -> tuple[str, ...]:
    """Return the frozen parts of a fused tensor that is partly trained; () for any other tensor."""
    trained = trained_parts(tensor, recipe)
    return tuple(part for part in tensor.parts if part not in trained) if trained else ()


def is_lora(name: str) -> bool:
    """Return whether a tensor is a LoRA matrix, A or B of a projection."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def learning_rate_factor(name: str, recipe: RecipeSections) -> float:
    """Return the factor of the learning rate for a tensor; 1 if no pattern matches its name."""
    factors = recipe.optimizer.lr_multipliers
    return next((factors[pattern] for pattern in factors if fnmatchcase(name, pattern)), 1.0)


def without_replaced_patterns(optimizer: OptimizerConfig, model: ModelConfig) -> OptimizerConfig:
    """Remove patterns that match only tensors of the attention that ``model.baseline`` replaced.

    The same recipe is then valid with and without ``model.baseline``.
    """
    if model.replaced is None or model.num_layers > MAX_LAYERS:
        return optimizer
    left = list(network_tensors(model))
    replaced = list(network_tensors(model.model_copy(update={"attention": model.replaced})))

    def is_kept(pattern: str) -> bool:
        return _matches_any(pattern, left) or not _matches_any(pattern, replaced)

    factors = optimizer.lr_multipliers
    changed = {"lr_multipliers": {each: factors[each] for each in factors if is_kept(each)}}
    if optimizer.trainable is None:
        return optimizer.model_copy(update=changed)
    trainable = tuple(filter(is_kept, optimizer.trainable))
    return optimizer.model_copy(update={**changed, "trainable": trainable})


def check_trainable(recipe: RecipeSections) -> None:
    """Check that every pattern matches a tensor, and that every pipeline stage trains a tensor."""
    optimizer, model = recipe.optimizer, recipe.model
    patterns = optimizer.trainable
    if trains_everything(recipe) and not optimizer.lr_multipliers:
        return
    if model.num_layers > MAX_LAYERS:
        raise ValueError(
            f"model.num_layers {model.num_layers} is more than the {MAX_LAYERS} layers whose "
            "tensors optimizer.trainable, optimizer.lr_multipliers and model.lora can name"
        )
    stages = [list(stage_tensors(recipe, n)) for n in range(recipe.parallel.pipeline)]
    tensors = [tensor for stage in stages for tensor in stage]
    for pattern in patterns or ():
        if not _matches_any(pattern, tensors):
            raise _no_match("optimizer.trainable", pattern, recipe)
    trained = [[each for each in stage if trained_parts(each, recipe)] for stage in stages]
    if not any(trained):
        raise ValueError(
            "optimizer.trainable is [], which freezes every tensor; name the tensors to train, or "
            "set it to null to train everything"
        )
    for number, of_stage in enumerate(trained):
        if not of_stage:
            raise ValueError(
                f"optimizer.trainable {shorten(str(list(patterns or ())))} leaves stage "
                f"{number + 1} of parallel.pipeline {recipe.parallel.pipeline} nothing to train; "
                "give parallel.pipeline 1, or a pattern that a tensor of each stage matches"
            )
    _check_multipliers([each for stage in trained for each in stage], recipe)


def check_muon(recipe: RecipeSections) -> None:
    """Check that Muon has matrices to train."""
    if recipe.optimizer.kind != "muon":
        return
    if recipe.model.lora is not None:
        raise ValueError(
            "optimizer.kind is 'muon' and model.lora trains two factors of each update; Muon "
            "orthogonalizes updates of whole matrices, so give kind 'adamw'"
        )
    if not trains_everything(recipe) and not any(
        tensor.is_matrix and trained_parts(tensor, recipe)
        for tensor in network_tensors(recipe.model)
    ):
        raise ValueError(
            "optimizer.kind is 'muon' and optimizer.trainable selects no matrix of a layer, so "
            "AdamW would train everything; give kind 'adamw'"
        )


def _check_multipliers(trained: Iterable[NamedTensor], recipe: RecipeSections) -> None:
    unused = dict(recipe.optimizer.lr_multipliers)
    for tensor in trained:
        matching = [p for p in recipe.optimizer.lr_multipliers if fnmatchcase(tensor.name, p)]
        if len(matching) > 1:
            raise ValueError(
                f"optimizer.lr_multipliers has {shorten(matching[0])!r} and "
                f"{shorten(matching[1])!r}, and {tensor.name} matches both; each tensor may match "
                "only one pattern"
            )
        for pattern in matching:
            unused.pop(pattern, None)
    for pattern in unused:
        raise _no_match("optimizer.lr_multipliers", pattern, recipe)


def _matches_any(pattern: str, tensors: Iterable[NamedTensor]) -> bool:
    return any(_matches(pattern, each.name, part) for each in tensors for part in _parts(each))


def _matches(pattern: str, name: str, part: str) -> bool:
    return fnmatchcase(name, pattern) or (part != "" and fnmatchcase(f"{name}:{part}", pattern))


def _parts(tensor: NamedTensor) -> tuple[str, ...]:
    return tensor.parts or ("",)


def _no_match(key: str, pattern: str, recipe: RecipeSections) -> ValueError:
    model = recipe.model
    of_layers = [
        in_layer(each, "*")
        for kind, _ in model.attention.by_kind(model.num_layers)
        for each in layer_tensors(model, kind)
    ]
    tensors = [*outer_tensors(model), *of_layers]
    names = [each.name for each in tensors]
    if key == "optimizer.trainable":
        names += [f"{each.name}:{part}" for each in tensors for part in each.parts]
    else:
        names = [each.name for each in tensors if trained_parts(each, recipe)]
    near = max(names, key=lambda name: _likeness(pattern, name))
    trained = "" if key == "optimizer.trainable" else " that is trained"
    return ValueError(
        f"{key} has {shorten(pattern)!r}, which matches no tensor{trained}; the nearest is {near!r}"
    )


def _likeness(pattern: str, name: str) -> float:
    """Return the similarity of a pattern and a tensor name, from 0 to 1.

    If the pattern begins with a wildcard, the rest of it is compared with the end of the name.
    """
    end = pattern.lstrip("*.")
    if end != pattern:
        name = ".".join(name.split(".")[-1 - end.count(".") :])
    return difflib.SequenceMatcher(None, end, name).ratio()
