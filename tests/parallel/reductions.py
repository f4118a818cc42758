"""The three ways of summing ZeRO 1's gradients over the ranks, on the same batches.

While the backward pass goes on, after it, and by DeepSpeed itself.
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

# The first tells how often each gradient comes.
STEPS = 2
# Elements: the real bucket of 50 million would hold a small network whole.
BUCKET = 2_000


def compare(recipe: Recipe, steps: Sequence[Sequence[Batch]]) -> dict[str, object]:
    """Weights after the steps, and where in the last of them the sums began; all ranks.

    Returns:
        ``weights``: by way, the hashes of every rank's weights. ``events``: by way, what came after
        what in the last step's passes, ``g`` a gradient and ``s`` the beginning of a sum, on this
        rank.
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
    """Return the hash of this rank's weights after the steps, and the events of the last step."""
    events: list[str] = []
    all_reduce = distributed.all_reduce

    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        group = parallel_state.data_group

        def recording(tensor: torch.Tensor, *args: object, **kwargs: object):
            # Counts and losses are single numbers.
            if kwargs.get("group") is group and tensor.numel() > 1:
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
