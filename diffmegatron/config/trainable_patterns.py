"""Which tensors a recipe trains, and at which multiple of its learning rate: patterns of names."""

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
from diffmegatron.files import clipped

# More than any network of this kind has; a pattern is compared with every name.
MAX_LAYERS = 1024


def trains_everything(recipe: RecipeSections) -> bool:
    """Whether no tensor is frozen."""
    return recipe.optimizer.trainable is None and recipe.model.lora is None


def trained_parts(tensor: NamedTensor, recipe: RecipeSections) -> tuple[str, ...]:
    """What of a tensor is trained: of its parts, or ("",) for one that has none; () is frozen."""
    parts = _parts(tensor)
    if trains_everything(recipe) or is_lora(tensor.name):
        return parts
    return _matched_parts(tensor.name, parts, recipe.optimizer.trainable or ())


# A search plans a recipe some thousand times, under other layouts.
@lru_cache(maxsize=2**14)
def _matched_parts(name: str, parts: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in parts if any(_matches(each, name, part) for each in patterns))


def frozen_parts(tensor: NamedTensor, recipe: RecipeSections) -> tuple[str, ...]:
    """The parts of a tensor that stay as they are while others of it are trained."""
    trained = trained_parts(tensor, recipe)
    return tuple(part for part in tensor.parts if part not in trained) if trained else ()


def is_lora(name: str) -> bool:
    """Whether a tensor is one of LoRA's two."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def learning_rate_factor(name: str, recipe: RecipeSections) -> float:
    """The multiple of the learning rate that a tensor is trained at."""
    factors = recipe.optimizer.lr_multipliers
    return next((factors[pattern] for pattern in factors if fnmatchcase(name, pattern)), 1.0)


def of_the_pair(optimizer: OptimizerConfig, model: ModelConfig) -> OptimizerConfig:
    """Without the patterns that name only what ``model.baseline`` has taken away.

    So a recipe and its Transformer differ in ``model.baseline`` alone. A pattern that neither has a
    tensor for stays, to be refused.
    """
    if model.replaced is None or model.num_layers > MAX_LAYERS:
        return optimizer
    left = list(network_tensors(model))
    replaced = list(network_tensors(model.model_copy(update={"attention": model.replaced})))

    def stays(pattern: str) -> bool:
        return _names_some(pattern, left) or not _names_some(pattern, replaced)

    factors = optimizer.lr_multipliers
    changed = {"lr_multipliers": {each: factors[each] for each in factors if stays(each)}}
    if optimizer.trainable is None:
        return optimizer.model_copy(update=changed)
    trainable = tuple(filter(stays, optimizer.trainable))
    return optimizer.model_copy(update={**changed, "trainable": trainable})


def check_trainable(recipe: RecipeSections) -> None:
    """Check that every pattern means something, and that every pipeline stage trains something.

    Raises:
        ValueError: naming the key, the pattern and the nearest name, or the stage.
    """
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
        if not _names_some(pattern, tensors):
            raise _no_match("optimizer.trainable", pattern, recipe)
    trained = [[each for each in stage if trained_parts(each, recipe)] for stage in stages]
    if not any(trained):
        raise ValueError(
            "optimizer.trainable is [], which freezes every tensor; name what is to be trained, or "
            "leave it out to train everything"
        )
    for number, of_stage in enumerate(trained):
        if not of_stage:
            raise ValueError(
                f"optimizer.trainable {clipped(str(list(patterns or ())))} leaves stage "
                f"{number + 1} of parallel.pipeline {recipe.parallel.pipeline} nothing to train; "
                "give parallel.pipeline 1, or a pattern that a tensor of each stage matches"
            )
    _check_multipliers([each for stage in trained for each in stage], recipe)


def _check_multipliers(trained: Iterable[NamedTensor], recipe: RecipeSections) -> None:
    unused = dict(recipe.optimizer.lr_multipliers)
    for tensor in trained:
        matching = [p for p in recipe.optimizer.lr_multipliers if fnmatchcase(tensor.name, p)]
        if len(matching) > 1:
            raise ValueError(
                f"optimizer.lr_multipliers has {clipped(matching[0])!r} and "
                f"{clipped(matching[1])!r}, and {tensor.name} matches both; give patterns of which "
                "each tensor matches one"
            )
        for pattern in matching:
            unused.pop(pattern, None)
    for pattern in unused:
        raise _no_match("optimizer.lr_multipliers", pattern, recipe)


def _names_some(pattern: str, tensors: Iterable[NamedTensor]) -> bool:
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
        f"{key} has {clipped(pattern)!r}, which matches no tensor{trained}; the nearest is {near!r}"
    )


def _likeness(pattern: str, name: str) -> float:
    """From 0 to 1; of a pattern that begins with a wildcard, to as much of the name's end."""
    end = pattern.lstrip("*.")
    if end != pattern:
        name = ".".join(name.split(".")[-1 - end.count(".") :])
    return difflib.SequenceMatcher(None, end, name).ratio()
