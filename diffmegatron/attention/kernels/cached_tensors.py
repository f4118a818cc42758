"""A decorator that caches tensors which are the same for all layers of a network."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")


def cached_tensors(create: Callable[..., T]) -> Callable[..., T]:
    """Cache the eight most recently used results of a function that creates tensors.

    All layers of a batch use the same tables of the attention mask. Without the cache every layer
    would copy them to the GPU, and wait for each copy. The function runs with inference_mode off,
    because autograd does not accept tensors that were created during inference.
    """
    return lru_cache(maxsize=8)(torch.inference_mode(False)(create))
