"""Ulysses: all-to-all, so that each rank attends with some heads over the whole sequence.

Jacobs et al., arXiv 2309.14509. Four all-to-alls of a rank's own activations and no other change:
the kernels see a plain causal sequence. The key-value heads of a tensor-parallel rank must divide
over the context-parallel ranks.
"""

from collections.abc import Callable

from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup

from diffmegatron.attention.context_parallel.zigzag import to_rank_order, to_sequence_order


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of a rank's queries over the whole sequence.

    Args:
        query: [s, b, heads, d], this rank's zigzag part; key and value likewise, with fewer heads.
            A contiguous part of the heads must be whole blocks
            (:class:`~diffmegatron.attention.variants.base.Heads`).
        group: the context-parallel ranks.
        attend: from the whole sequence of a part of the heads, [P s, b, heads, d] each, to
            [P s, b, heads, e].

    Returns:
        [s, b, heads, e].
    """
    size = group.size()
    heads = attend(*(_to_heads(x, group) for x in (query, key, value)))
    by_rank = to_rank_order(heads, size).unflatten(0, (size, -1))
    return all_to_all(group, by_rank).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_heads(local: Tensor, group: ProcessGroup) -> Tensor:
    """[s, b, heads, d] of some positions as [P s, b, heads / P, d] of some heads."""
    parts = local.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4)
    return to_sequence_order(all_to_all(group, parts).flatten(0, 1), group.size())
