"""Checks for calls that a GPU, cuBLAS or NCCL refuses and torch's fake tensors accept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class SimulatedCudaError(RuntimeError):
    """Error for code that would fail on a GPU, or that waits for the GPU without a reason."""


# Operations that multiply matrices. All operands of an operation must have one dtype.
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten.addmv, aten.mv, aten.dot,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention_backward,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# Operations that a network of this package might call and that torch refuses on CUDA under
# use_deterministic_algorithms.
NOT_DETERMINISTIC = {aten.cumsum, aten.cumsum_, aten.bincount, aten.histc, aten.kthvalue, aten.put_}
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
}


def check_operation(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Check that an operation of torch would not fail on a GPU.

    Raises:
        SimulatedCudaError: the operation would fail on a GPU.
    """
    packet = func.overloadpacket
    if packet in PRODUCTS:
        dtypes = {each.dtype for each in tensors if each.is_floating_point()}
        # Compare only the 4-dimensional tensors: queries, keys, values, outputs and gradients. The
        # backward pass also has the log-sum-exp and the random state, which have other dtypes.
        if packet in FUSED_ATTENTION:
            dtypes = {each.dtype for each in tensors if each.dim() == 4}
            if not dtypes <= {torch.bfloat16, torch.float16}:
                raise SimulatedCudaError(f"{func} takes bf16 or fp16, got {_names(dtypes)}")
        if len(dtypes) > 1:
            raise SimulatedCudaError(f"{func} multiplies tensors of {_names(dtypes)}")
    elif packet in INDEXING:
        devices = {
            each.device.type for each in (args[0], *tree_leaves(args[1])) if each is not None
        }
        if len(devices) > 1:
            raise SimulatedCudaError(
                f"{func} indexes a tensor on {args[0].device} by one elsewhere"
            )
    elif (
        packet in NOT_DETERMINISTIC
        and torch.are_deterministic_algorithms_enabled()
        and any(each.is_cuda and each.is_floating_point() for each in tensors)
    ):
        raise SimulatedCudaError(f"{func} has no deterministic form on CUDA")


@dataclass(frozen=True)
class Payload:
    """Tensors and payload of a collective.

    Attributes:
        operation: name of the operation in recordings, such as ``all_reduce``.
        tensors: all tensors of the call, inputs and outputs.
        bytes: size of the payload, as in :class:`~tests.simulated_cuda.recording.Collective`.
    """

    operation: str
    tensors: Sequence[Tensor]
    bytes: int


def check_collective(name: str, args: Sequence[Any], size: int) -> Payload:
    """Check that NCCL would accept a call of ``torch.ops.c10d``, and return its payload.

    Args:
        name: name of the operation, such as ``allreduce_``.
        args: arguments of the call.
        size: number of ranks of the group.

    Raises:
        SimulatedCudaError: a tensor is not on the device of the group, a tensor is not contiguous
            (except for all_reduce and broadcast), or dtypes or sizes do not match.
        NotImplementedError: no check of this operation exists.
    """
    if name == "barrier":  # The tensor that torch passes is a dummy and is not checked.
        return Payload("barrier", [], 0)
    operation, payload, tensors, shares = _described(name, args, size)
    for tensor in tensors:
        if not tensor.is_cuda:
            raise SimulatedCudaError(f"{operation} of NCCL takes a tensor on {tensor.device}")
        if not (tensor.is_contiguous() or operation in ("all_reduce", "broadcast")):
            raise SimulatedCudaError(f"{operation} takes a tensor that is not contiguous")
    dtypes = {each.dtype for each in tensors}
    if len(dtypes) > 1:
        raise SimulatedCudaError(f"{operation} takes tensors of {_names(dtypes)}")
    for whole, share in shares:
        if whole != size * share:
            raise SimulatedCudaError(
                f"{operation} over {size} ranks takes a whole of {whole} elements and a share of "
                f"{share}"
            )
    return Payload(operation, tensors, sum(each.numel() * each.element_size() for each in payload))


def _described(
    name: str, args: Sequence[Any], size: int
) -> tuple[str, list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """Describe a collective for :func:`check_collective`.

    Returns:
        The operation's name in recordings, the tensors whose bytes are counted, all tensors, and
        pairs (elements of a whole tensor, elements of one rank's share of it) to check against the
        size of the group.
    """
    first = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    if name in _ALIKE:
        return _ALIKE[name], first, first, []
    second = list(args[1]) if isinstance(args[1], (list, tuple)) else [args[1]]
    if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        pairs = [(o.numel(), i.numel()) for o, i in zip(first, second, strict=True)]
        return "all_gather", first, first + second, pairs
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        pairs = [(i.numel(), o.numel()) for o, i in zip(first, second, strict=True)]
        return "reduce_scatter", second, first + second, pairs
    if name in ("allgather_", "gather_"):
        wholes, shares = first, second
    elif name in ("reduce_scatter_", "scatter_"):
        wholes, shares = second, first
    elif name == "alltoall_":
        if len(first) != size or len(second) != size:
            raise SimulatedCudaError(f"all_to_all over {size} ranks takes {len(second)} tensors")
        return "all_to_all", second, first + second, []
    elif name == "alltoall_base_":
        _check_splits(first[0], args[3], size)
        _check_splits(second[0], args[4], size)
        return "all_to_all", second, first + second, []
    else:
        raise NotImplementedError(f"c10d::{name} is not described here")
    for whole, share in zip(wholes, shares, strict=True):
        if len(whole) != size or any(each.numel() != share.numel() for each in whole):
            sizes = sorted({each.numel() for each in whole})
            raise SimulatedCudaError(
                f"{name} over {size} ranks takes {len(whole)} tensors of {sizes} elements beside "
                f"one of {share.numel()}"
            )
    many = [each for whole in wholes for each in whole]
    return _LISTS[name], many, many + shares, []


_ALIKE = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast",
    "reduce_": "reduce", "send": "send", "recv_": "recv", "recv_any_source_": "recv",
}  # fmt: skip
_LISTS = {
    "allgather_": "all_gather", "gather_": "gather", "reduce_scatter_": "reduce_scatter",
    "scatter_": "scatter",
}  # fmt: skip


def _check_splits(tensor: Tensor, splits: Sequence[int], size: int) -> None:
    rows = tensor.shape[0] if tensor.dim() else 0
    if (len(splits) != size or sum(splits) != rows) if splits else rows % size:
        raise SimulatedCudaError(
            f"all_to_all over {size} ranks takes {rows} rows in {list(splits) or 'equal'} parts"
        )


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
