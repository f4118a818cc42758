"""A decorator that caches tensors which are the same for all layers of a network."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")


def cached_tensors(create: Callable[..., T]) -> Callable[..., T]:
    """Cache the eight most recently used results of a function that creates tensors.

    For one batch all layers use the same attention mask, and so the same tables that describe it
    (for example the first and last visible key of each query). Without the cache every layer would
    copy these tables to the GPU, and each copy would wait for the GPU.

    The function always runs with inference_mode off. A result that was cached during inference can
    therefore be used in training, where autograd does not accept tensors of inference_mode.
    """
    return lru_cache(maxsize=8)(torch.inference_mode(False)(create))
