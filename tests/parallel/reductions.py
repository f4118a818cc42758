"""Comparison of three ways to sum the gradients of ZeRO 1 over the ranks, on the same batches.

The ways are ``overlapping`` (the project's sums during the backward pass), ``after`` (the project's
sums after the backward pass) and ``deepspeed`` (DeepSpeed's own code).
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from unittest import mock

import torch
from torch import distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.optim import zero
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import forward_backward

# Number of training steps. Sums run during the backward pass only from the second step on, because
# the first step counts how often the backward pass adds to each gradient.
STEPS = 2
# Elements per gradient bucket. A bucket of 50 million, the default, would hold all gradients of a
# small network, so the only sum would begin at the end of the backward pass.
BUCKET = 2_000


def compare(recipe: Recipe, steps: Sequence[Sequence[Batch]]) -> dict[str, object]:
    """Train in each way, and return hashes of the weights and the order of gradients and sums.

    All ranks must call this function.

    Returns:
        A dict with two keys, each with a dict by way. ``weights`` has a list of the hashes of all
        ranks' weights after the steps. ``events`` has a string with the events of the last step on
        this rank, in their order: ``g`` is a gradient that is ready, and ``s`` is the beginning of
        a sum.
    """
    found: dict[str, dict] = {"weights": {}, "events": {}}
    off = recipe.parallel.model_copy(update={"overlap_gradients": False})
    with mock.patch.object(zero, "REDUCE_BUCKET", BUCKET):
        for way in ("overlapping", "after", "deepspeed"):
            parallel = recipe.parallel if way == "overlapping" else off
            with ExitStack() as stack:
                if way == "deepspeed":
                    stack.enter_context(mock.patch.object(zero, "flat_gradients", lambda _: None))
                digest, events = _train(recipe.model_copy(update={"parallel": parallel}), steps)
            digests = [""] * distributed.get_world_size()
            distributed.all_gather_object(digests, digest)
            found["weights"][way], found["events"][way] = digests, events
    return found


def _train(recipe: Recipe, steps: Sequence[Sequence[Batch]]) -> tuple[str, str]:
    """Train; return the hash of this rank's weights and the events of the last step."""
    events: list[str] = []
    all_reduce = distributed.all_reduce

    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        group = parallel_state.data_context_group

        def recording(tensor: torch.Tensor, *args: object, **kwargs: object):
            # One number is a count, and two are the cross-entropy and the z-loss, not gradients.
            if kwargs.get("group") is group and tensor.numel() > 2:
                events.append("s")
            return all_reduce(tensor, *args, **kwargs)

        network = build_model(recipe, parallel_state)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: events.append("g"))
        with (
            ZeroEngine(network, recipe, parallel_state) as engine,
            mock.patch.object(distributed, "all_reduce", recording),
        ):
            for batches in steps:
                events.clear()
                forward_backward(engine, batches, parallel_state)
                engine.step(1e-2, allow=lambda _: True)
        digest = hashlib.sha256()
        for parameter in network.parameters():
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), "".join(events)
