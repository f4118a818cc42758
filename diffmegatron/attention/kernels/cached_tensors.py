"""A decorator that caches tensors which all layers of a batch use."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")


def cached_tensors(create: Callable[..., T]) -> Callable[..., T]:
    """Cache the last eight results of a function that creates tensors.

    All layers of a batch use the same tables of the mask, and each copy of a table to a GPU would
    wait for the GPU. The tensors are created outside of inference_mode, because training cannot use
    tensors that were created under it.
    """
    return lru_cache(maxsize=8)(torch.inference_mode(False)(create))
