"""The stages of a recipe: what each may be called, and whether it can start with another."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from typing import Any

from diffmegatron.attention.variants import Variant
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import clipped

MAX_STAGES = 64
# Before an override of one stage alone.
STAGES = "stages."
# What a run and its jobs write into run_dir, beside which a stage's folder would stand.
RESERVED = frozenset(
    {"attempts", "checkpoints", "events", "job.sh", "job.yaml", "job_number", "lock", "profile"}
    | {"metrics.jsonl", "recipe.yaml", "stacks", "tensorboard", "torchrun.sh", "wandb_id"}
)
# Numbered files of jobs, and what is written beside a file before it is renamed to it.
_RESERVED_FORMS = re.compile(
    rf"job_\d+\.log|preflight_\d+|({'|'.join(map(re.escape, sorted(RESERVED)))})\..*"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# What a stage may change of the network: none is in the weights that it starts with.
_ROTARY = ("model.rope_theta", "model.rope_scaling")
_FREE = frozenset({*_ROTARY, "model.initialization"})


@dataclass(frozen=True)
class Stage:
    """One entry of ``stages``.

    Attributes:
        changes: of the recipe around it.
        start_from: the stage that it starts with; None: of the first, what the recipe says.
    """

    changes: dict[str, Any]
    start_from: str | None


def read_stages(stages: Any, path: str) -> dict[str, Stage]:
    """The stages of a recipe by their names, in order.

    Raises:
        UserError: ``stages``, of the file ``path``, is not a list of mappings with such names, or
            one starts with something else than a stage before it.
    """
    if not isinstance(stages, list) or not 1 <= len(stages) <= MAX_STAGES:
        raise UserError(
            f"{path}: stages is {clipped(repr(stages))}; it takes a list of 1 to {MAX_STAGES} "
            "mappings, or leave it out"
        )
    named: dict[str, Stage] = {}
    for stage in stages:
        changes = dict(stage) if isinstance(stage, dict) else {}
        name = changes.pop("name", None)
        if not isinstance(name, str) or name in named or not is_stage_name(name):
            raise UserError(
                f"{path}: stages must be a list of mappings, each with a name of its own: up to 64 "
                "letters, digits, '_', '-' and '.', no '-' or '.' first, and none of "
                f"{', '.join(sorted(RESERVED))}; {clipped(repr(stage))} is not"
            )
        start = changes.pop("start_from", next(reversed(named), None))
        if start is not None and (not isinstance(start, str) or start not in named):
            before = f"one of {', '.join(named)}" if named else "checkpoint.start_from of the first"
            raise UserError(
                f"{path}, stage {name!r}: start_from is {clipped(repr(start))}; it takes a stage "
                f"before it: {before}"
            )
        checkpoint = changes.get("checkpoint")
        if start is not None and isinstance(checkpoint, dict) and "start_from" in checkpoint:
            raise _starts_elsewhere(f"{path}, stage {name!r}", checkpoint["start_from"])
        named[name] = Stage(changes, start)
    return named


def is_stage_name(name: str) -> bool:
    """Return whether a folder of this name can stand in a ``run_dir``."""
    is_reserved = name in RESERVED or _RESERVED_FORMS.fullmatch(name)
    return _NAME.fullmatch(name) is not None and not is_reserved


def _starts_elsewhere(origin: str, start: Any) -> UserError:
    return UserError(
        f"{origin}: checkpoint.start_from is {clipped(repr(start))}; a stage after the first "
        "starts with the one before, or the one that start_from beside its name says; leave it out"
    )


def by_stage(
    overrides: Sequence[str], stages: Mapping[str, Stage], path: str
) -> dict[str, list[str]]:
    """What the command line says of each stage: ``stages.NAME.`` before a key is for one alone.

    Such an override comes after those for every stage, wherever it stands.

    Raises:
        UserError: there is no stage of that name, or it is given another start.
    """
    shared = [each for each in overrides if not each.startswith(STAGES)]
    own: dict[str, list[str]] = {name: [] for name in stages}
    for override in overrides:
        if not override.startswith(STAGES):
            continue
        rest = override.removeprefix(STAGES)
        # A name may have dots in it, and be the beginning of another.
        name = max((each for each in stages if rest.startswith(f"{each}.")), key=len, default=None)
        if name is None:
            raise UserError(
                f"override {clipped(override)!r} names no stage of {path}; give "
                f"stages.NAME.section.key=value with one of {', '.join(stages)}"
            )
        key, _, value = rest.removeprefix(f"{name}.").partition("=")
        if key == "checkpoint.start_from" and stages[name].start_from is not None:
            raise _starts_elsewhere(f"override {clipped(override)!r}", value)
        own[name].append(rest.removeprefix(f"{name}."))
    return {name: [*shared, *changes] for name, changes in own.items()}


def check_follows(before: Recipe, before_name: str, now: Recipe, now_name: str) -> None:
    """Refuse a run that cannot start with the weights of another; LoRA may be added to them.

    Args:
        before: whose weights they are.
        before_name: what it is called in the sentence.
        now: what would start with them.
        now_name: likewise.

    Raises:
        UserError: their networks or tokenizers differ, with the first key that does. Attention may
            be of a kind that builds on the other's.
    """
    attention = now.model.attention
    foundation = attention.foundation()
    if foundation is not None and foundation.kind == before.model.attention.kind:
        attention = foundation
    was, is_now = (
        model_keys(recipe.model, of) | {"data.tokenizer": recipe.data.tokenizer}
        for recipe, of in ((before, before.model.attention), (now, attention))
    )
    free = _FREE | {f"model.attention.{key}" for key in attention.free_keys}
    # An import names its own folder in full.
    if realpath(was["data.tokenizer"]) == realpath(is_now["data.tokenizer"]):
        free |= {"data.tokenizer"}
    for key, value in is_now.items():
        is_new_lora = key == "model.lora" and was.get(key) is None
        if key not in free and not is_new_lora and was.get(key) != value:
            raise UserError(
                f"{before_name} has {key} {was.get(key)!r} and {now_name} says {value!r}; a run "
                "that starts with another's weights must have the same network and tokenizer"
            )


def rotary_changes(before: Recipe, now: Recipe) -> list[str]:
    """What of the rotary embedding is another than that of the weights a run starts with.

    No error, as an extension to longer sequences changes it; a stage behind the extension that does
    not repeat it would change it back.
    """
    was, is_now = (model_keys(each.model, each.model.attention) for each in (before, now))
    return [f"{key} {was[key]} -> {is_now[key]}" for key in _ROTARY if was[key] != is_now[key]]


def model_keys(model: ModelConfig, attention: Variant) -> dict[str, Any]:
    """A network by dotted keys, with a kind of attention, which comes before that kind's own."""
    others = model.model_dump(exclude={"attention"})
    return {f"model.attention.{key}": value for key, value in attention.keys().items()} | {
        f"model.{key}": value for key, value in others.items()
    }
