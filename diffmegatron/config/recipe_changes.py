"""Changes between the recipes of a run and of the run whose weights it starts with."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.config.model_config import RopeScaling
from diffmegatron.config.schema import Recipe
from diffmegatron.config.width_scaling import matrix_rate
from diffmegatron.files import shorten

# Keys that differ between any two runs, or that a run sets itself.
_OMITTED = frozenset({"run_dir", "checkpoint.start_from", "training.chosen_kernels"})
# A run replaces null of these keys by its decision.
_DECIDED = frozenset({"data.reset_attention_mask"})


def changes_in_words(before: Recipe, now: Recipe) -> str | None:
    """Return one line with all changed keys as ``KEY OLD -> NEW``, in YAML; None without any."""
    changes = [
        f"{key} {_yaml(old)} -> {_yaml(new)}{_consequence(key, before, now)}"
        for key, old, new in _section_changes(before, now)
    ]
    return f"changes of {before.run_dir}: {'; '.join(changes)}" if changes else None


def _consequence(key: str, before: Recipe, now: Recipe) -> str:
    """Return the rest of the sentence about a change of ``key`` that ends muP, otherwise ""."""
    schemes = [each.model.initialization.scheme for each in (before, now)]
    # muP's factor of the rate, with the optimizer of ``now``.
    rate = matrix_rate(now.model_copy(update={"model": before.model}))
    if key != "model.initialization.scheme" or schemes[0] != "mup" or rate == 1:
        return ""
    return (
        ", so the learning rate of the layers' matrices is optimizer.lr and no longer optimizer.lr "
        f"x {rate:.3g}: lower optimizer.lr, or keep 'mup'"
    )


def unscaled_extension(earlier: Sequence[Recipe], now: Recipe) -> str | None:
    """Return a warning if ``now`` has a longer context than before and the same rotary embedding.

    ``earlier`` has the recipes of the runs that trained the weights of ``now``, the last one first,
    back to the run that began with random or imported weights; it is empty if they are unknown.
    """
    if not earlier:
        return None
    longest = max(earlier, key=lambda each: each.training.seq_length)
    lengths = longest.training.seq_length, now.training.seq_length
    if lengths[0] >= lengths[1] or _rotary(earlier[0]) != _rotary(now):
        return None
    return (
        f"training.seq_length rises from {lengths[0]} ({longest.run_dir}) to {lengths[1]}, and "
        "model.rope_theta and model.rope_scaling are unchanged; a longer context usually needs a "
        "larger model.rope_theta, or model.rope_scaling"
    )


def _rotary(recipe: Recipe) -> tuple[object, ...]:
    return recipe.model.rope_theta, recipe.model.rope_scaling


def _section_changes(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, old value, new value) of the keys that differ in two sections of one class."""
    for name, field in type(now).model_fields.items():
        key, old, new = f"{prefix}{name}", getattr(before, name), getattr(now, name)
        if key in _OMITTED or field.exclude or old == new:
            continue
        if key in _DECIDED and None in (old, new):
            continue
        if isinstance(new, LayerKinds):
            yield from _attention_changes(old, new, f"{key}.")
        elif _are_comparable(old, new):
            yield from _section_changes(old, new, f"{key}.")
        else:
            yield key, _plain(old), _plain(new)


def _attention_changes(
    before: LayerKinds, now: LayerKinds, prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    was, is_now = before.keys(), now.keys()
    for name in dict.fromkeys([*was, *is_now]):
        if was.get(name) != is_now.get(name):
            yield f"{prefix}{name}", _plain(was.get(name)), _plain(is_now.get(name))


def _are_comparable(old: object, new: object) -> bool:
    """Return whether both are sections of one class that have the same keys."""
    if isinstance(old, RopeScaling) and isinstance(new, RopeScaling):
        return old.kind == new.kind
    return isinstance(new, BaseModel) and type(old) is type(new)


def _plain(value: Any) -> Any:
    """Return the value without the sections' keys that have their defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _yaml(value: Any) -> str:
    """Return a value in YAML's flow style, on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return shorten(text.removesuffix("\n").removesuffix("\n..."))
