"""A decorator that caches tensors which are the same for all layers of a network."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")


def cached_tensors(create: Callable[..., T]) -> Callable[..., T]:
    """Cache the eight most recently used results of a function that creates tensors.

    For one batch all layers use the same tables that describe the attention mask. Without the cache
    every layer would copy these tables to the GPU, and each copy would wait for the GPU.

    The function runs with inference_mode off. Otherwise autograd would not accept results that were
    cached during inference.
    """
    return lru_cache(maxsize=8)(torch.inference_mode(False)(create))
