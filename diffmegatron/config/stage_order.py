"""Stages of a recipe: names, overrides, and checks that one run can start from another."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from typing import Any

from diffmegatron.attention.variants import Variant
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

MAX_STAGES = 64
# Prefix of an override that changes only one stage: stages.NAME.key=value.
STAGES = "stages."
# Files and folders that a run and its jobs write into run_dir. Stages cannot have these names,
# because the folders of stages are also in run_dir.
RESERVED = frozenset(
    {"attempts", "checkpoints", "events", "job.sh", "job.yaml", "job_number", "lock", "profile"}
    | {"metrics.jsonl", "recipe.yaml", "stacks", "tensorboard", "torchrun.sh", "wandb_id"}
)
# More names that stages cannot have: numbered files of jobs, and temporary files that are renamed
# to a reserved name.
_RESERVED_FORMS = re.compile(
    rf"job_\d+\.log|preflight_\d+|({'|'.join(map(re.escape, sorted(RESERVED)))})\..*"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# A stage may change the keys in _FREE, because the weights of an earlier stage fit any value of
# these keys. _ROTARY contains the keys of the rotary embedding.
_ROTARY = ("model.rope_theta", "model.rope_scaling")
_FREE = frozenset({*_ROTARY, "model.initialization"})


@dataclass(frozen=True)
class Stage:
    """One entry of ``stages``: a training run that usually starts with weights of an earlier stage.

    Attributes:
        changes: values that replace those outside of ``stages``, nested by section.
        start_from: name of the stage whose weights this stage starts with. None: the stage starts
            with the weights of ``checkpoint.start_from``, or from scratch if this key is not set.
    """

    changes: dict[str, Any]
    start_from: str | None


def read_stages(stages: Any, path: str) -> dict[str, Stage]:
    """Return the stages of a recipe by name, in order.

    A stage without the key ``start_from`` starts from the stage before it, if there is one.

    Raises:
        UserError: ``stages`` is not a list of mappings with valid, different names; a
            ``start_from`` is neither null nor an earlier stage; or a stage that starts from an
            earlier stage also sets ``checkpoint.start_from``.
    """
    if not isinstance(stages, list) or not 1 <= len(stages) <= MAX_STAGES:
        raise UserError(
            f"{path}: stages is {shorten(repr(stages))}; give a list of 1 to {MAX_STAGES} "
            "mappings, or leave it out"
        )
    named: dict[str, Stage] = {}
    for stage in stages:
        changes = dict(stage) if isinstance(stage, dict) else {}
        name = changes.pop("name", None)
        if not isinstance(name, str) or name in named or not is_stage_name(name):
            raise UserError(
                f"{path}: stages must be a list of mappings, each with its own name: up to 64 "
                "letters, digits, '_', '-' and '.', no '-' or '.' first, and none of "
                f"{', '.join(sorted(RESERVED))}; {shorten(repr(stage))} is not"
            )
        start = changes.pop("start_from", next(reversed(named), None))
        if start is not None and (not isinstance(start, str) or start not in named):
            hint = f"give one of {', '.join(named)}" if named else "give checkpoint.start_from"
            raise UserError(
                f"{path}, stage {name!r}: start_from is {shorten(repr(start))}, which is not "
                f"an earlier stage; {hint}"
            )
        checkpoint = changes.get("checkpoint")
        if start is not None and isinstance(checkpoint, dict) and "start_from" in checkpoint:
            raise _starts_elsewhere(f"{path}, stage {name!r}", checkpoint["start_from"])
        named[name] = Stage(changes, start)
    return named


def is_stage_name(name: str) -> bool:
    """Return whether a stage and its folder in ``run_dir`` may have this name."""
    is_reserved = name in RESERVED or _RESERVED_FORMS.fullmatch(name)
    return _NAME.fullmatch(name) is not None and not is_reserved


def _starts_elsewhere(origin: str, start: Any) -> UserError:
    return UserError(
        f"{origin}: checkpoint.start_from is {shorten(repr(start))}; a stage after the first "
        "starts from the stage before it, or from its key start_from; leave it out"
    )


def by_stage(
    overrides: Sequence[str], stages: Mapping[str, Stage], path: str
) -> dict[str, list[str]]:
    """Return the overrides that apply to each stage, by the stage's name.

    An override ``stages.NAME.key=value`` applies to one stage, as ``key=value``. All other
    overrides apply to every stage, and come first in each list.

    Raises:
        UserError: no stage has the name NAME, or the override sets ``checkpoint.start_from`` of a
            stage that starts from an earlier stage.
    """
    shared = [each for each in overrides if not each.startswith(STAGES)]
    own: dict[str, list[str]] = {name: [] for name in stages}
    for override in overrides:
        if not override.startswith(STAGES):
            continue
        rest = override.removeprefix(STAGES)
        # Names may contain dots and may be prefixes of each other, so the longest match is chosen.
        name = max((each for each in stages if rest.startswith(f"{each}.")), key=len, default=None)
        if name is None:
            raise UserError(
                f"override {shorten(override)!r} names no stage of {path}; give "
                f"stages.NAME.section.key=value with one of {', '.join(stages)}"
            )
        key, _, value = rest.removeprefix(f"{name}.").partition("=")
        if key == "checkpoint.start_from" and stages[name].start_from is not None:
            raise _starts_elsewhere(f"override {shorten(override)!r}", value)
        own[name].append(rest.removeprefix(f"{name}."))
    return {name: [*shared, *changes] for name, changes in own.items()}


def check_can_start_from(before: Recipe, before_name: str, now: Recipe, now_name: str) -> None:
    """Check that the run ``now`` can start with the weights of the run ``before``.

    The two networks and tokenizers must be equal, with these exceptions:

    - The new run may add LoRA.
    - It may change the keys in ``_FREE`` (rotary embedding, initialization), and the ``free_keys``
      of its attention.
    - Its kind of attention may extend the kind with which the weights were trained
      (:meth:`~diffmegatron.attention.variants.base.Variant.foundation`).

    Error messages call the two recipes ``before_name`` and ``now_name``.

    Raises:
        UserError: the networks or tokenizers differ; the message names the first such key.
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
    # The path of the same tokenizer can be relative in one recipe and absolute in the other, for
    # example after ``diffmegatron import``. Therefore compare resolved paths.
    if realpath(was["data.tokenizer"]) == realpath(is_now["data.tokenizer"]):
        free |= {"data.tokenizer"}
    for key, value in is_now.items():
        is_new_lora = key == "model.lora" and was.get(key) is None
        if key not in free and not is_new_lora and was.get(key) != value:
            raise UserError(
                f"{before_name} has {key} {was.get(key)!r} and {now_name} has {value!r}; a run "
                "that starts with another's weights must have the same network and tokenizer"
            )


def rotary_changes(before: Recipe, now: Recipe) -> list[str]:
    """Return each change of the rotary embedding as one string, ``key old -> new``.

    Such changes are allowed, because training on longer sequences needs them. Callers print them,
    because a stage that does not repeat the change of an earlier stage silently undoes it.
    """
    was, is_now = (model_keys(each.model, each.model.attention) for each in (before, now))
    return [f"{key} {was[key]} -> {is_now[key]}" for key in _ROTARY if was[key] != is_now[key]]


def model_keys(model: ModelConfig, attention: Variant) -> dict[str, Any]:
    """Return the settings of a network as a dict with dotted keys, such as ``model.num_layers``.

    The settings of ``attention`` replace those of ``model.attention``.
    """
    others = model.model_dump(exclude={"attention"})
    return {f"model.attention.{key}": value for key, value in attention.keys().items()} | {
        f"model.{key}": value for key, value in others.items()
    }
