"""Forward passes over several texts at once, with a cache of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Maximum number of positions whose logits `BatchedNetwork.score` computes together.
_LOGITS_AT_ONCE = 1024


class _ReservedLayer(DynamicLayer):
    """Key-value cache of one layer for up to ``columns`` tokens per row, allocated once.

    ``DynamicCache`` of ``transformers`` copies all keys and values for each new token. With
    ``StaticCache``, attention also computes over the unused part of the memory.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns
        self._reserved: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._reserved = tuple(
            each.new_empty((*each.shape[:2], self._columns, each.shape[3]))
            for each in (key_states, value_states)
        )
        self._use(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, heads, t, channels]; return views of all cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.get_seq_length()
        last = first + key_states.shape[2]
        for reserved, new in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[:, :, first:last] = new
        self._use(last)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self._reserved = tuple(each[indices] for each in self._reserved)
        self._use(length)

    def _use(self, length: int) -> None:
        self.keys, self.values = (each[:, :, :length] for each in self._reserved)


@dataclass
class TextRows:
    """State of a batch with one text per row.

    ``cache`` has the keys and values; None if each text is processed in one forward pass.
    ``is_token`` is False for padding, bool [rows, columns processed so far].
    """

    cache: Cache | None
    is_token: Tensor
    has_padding: bool = False

    def keep(self, places: Sequence[int]) -> None:
        """Keep only the rows with the indices ``places``."""
        indices = torch.tensor(places, device=self.is_token.device)
        self.is_token = self.is_token[indices]
        if self.cache is not None:
            self.cache.batch_select_indices(indices)


class BatchedNetwork:
    """A causal network that processes a batch of texts, one per row, in chunks.

    A chunk is a list of the next tokens of one row. Short chunks of a batch are padded at the end.
    If :attr:`keeps_all_tokens` is false, a row with padding must not read another chunk. ``start``
    is any valid token id.
    """

    def __init__(self, network: PreTrainedModel, start: int) -> None:
        self._network, self._start = network, start
        self._prefix: tuple[list[int], TextRows] | None = None

    @cached_property
    def keeps_all_tokens(self) -> bool:
        """True if the cache keeps every token, and the network has the argument ``position_ids``.

        Masked padding between the tokens of a row then has no effect. False for sliding windows and
        recurrent layers.
        """
        network = self._network
        layers = DynamicCache(config=network.config).layers
        return (
            not getattr(network, "_is_stateful", False)
            and bool(layers)
            and all(type(layer) is DynamicLayer for layer in layers)
            and "position_ids" in signature(network.base_model.forward).parameters
        )

    def empty_rows(self, count: int, columns: int | None = None) -> TextRows:
        """Return empty rows, with a cache for ``columns`` tokens per row, including padding.

        If ``columns`` is None, the rows have no cache, and each can read only one chunk.
        """
        is_token = torch.ones(count, 0, dtype=torch.bool, device=self._network.device)
        return TextRows(None if columns is None else self._reserved(columns), is_token)

    def after(self, prefixes: TextRows, index: Sequence[int], columns: int) -> TextRows:
        """Return new rows that continue texts of ``prefixes``; ``prefixes`` is not changed.

        Args:
            index: for each new row, the index of the row in ``prefixes`` that it continues.
            columns: number of tokens per row after the prefixes, including padding.
        """
        chosen = torch.tensor(index, device=self._network.device)
        cache = self._reserved(prefixes.is_token.shape[1] + columns)
        assert prefixes.cache is not None
        for number, layer in enumerate(prefixes.cache.layers):
            cache.update(layer.keys[chosen], layer.values[chosen], number)
        return TextRows(cache, prefixes.is_token[chosen], prefixes.has_padding)

    def read_prefix(self, ids: Sequence[int]) -> TextRows:
        """Return one row that has read ``ids``; the last result is cached."""
        if self._prefix is None or self._prefix[0] != ids:
            self.drop_prefix()
            rows = self.empty_rows(1, len(ids))
            self.read(rows, [ids])
            self._prefix = (list(ids), rows)
        return self._prefix[1]

    def drop_prefix(self) -> None:
        """Free the row of the last :meth:`read_prefix`."""
        self._prefix = None

    def read(
        self,
        rows: TextRows,
        chunks: Sequence[Sequence[int]],
        places: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Run the network on the next chunk of each row, and update the rows.

        Args:
            chunks: next token ids of each row; a list may be empty.
            places: the n positions whose outputs are returned, as (row, column within the chunk).

        Returns:
            The argument ``found`` of :meth:`logits` and :meth:`score`, in the network's dtype: last
            hidden states [n, hidden_size], or logits [n, vocab_size] if these are not a projection
            of the hidden states.
        """
        device = self._network.device
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        # Pad with a token of the same row, so that a NaN in the embedding of a token affects only
        # the rows that contain this token.
        ids = [
            [*chunk, *[chunk[-1] if chunk else self._start] * (width - len(chunk))]
            for chunk in chunks
        ]
        columns = torch.arange(width, device=device)
        is_token = torch.cat(
            (rows.is_token, columns < torch.tensor(lengths, device=device)[:, None]), dim=1
        )
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(ids, dtype=torch.int64, device=device),
            "past_key_values": rows.cache,
            "use_cache": rows.cache is not None,
        }
        if rows.has_padding:
            inputs["attention_mask"] = is_token.long()
            inputs["position_ids"] = rows.is_token.sum(1, keepdim=True) + columns
        rows.is_token = is_token
        rows.has_padding |= min(lengths) < width
        wanted = torch.tensor(places, dtype=torch.int64, device=device).reshape(-1, 2)
        if self._ends_in_projection:
            step = self._network.base_model(**inputs)
            found = step.last_hidden_state[wanted[:, 0], wanted[:, 1]]
        else:
            first = min((column for _, column in places), default=width - 1)
            step = self._network(**inputs, logits_to_keep=width - first)
            found = step.logits[wanted[:, 0], wanted[:, 1] - first]
        if rows.cache is not None:
            rows.cache = step.past_key_values
        return found

    def logits(self, found: Tensor) -> Tensor:
        """Return float32 logits [n, vocab_size] for the output ``found`` of :meth:`read`."""
        if self._ends_in_projection:
            found = self._network.get_output_embeddings()(found)
        return found.float()

    def score(self, found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses in nats, float32 [n], and whether each token is the likeliest, bool [n].

        ``wanted`` contains the ids of the n tokens. ``found`` is the output of :meth:`read` at the
        positions before these tokens.
        """
        nats, likeliest = [], []
        parts = zip(found.split(_LOGITS_AT_ONCE), wanted.split(_LOGITS_AT_ONCE), strict=True)
        for part, tokens in parts:
            logits = self.logits(part)
            tokens = tokens.to(logits.device)
            nats.append(torch.nn.functional.cross_entropy(logits, tokens, reduction="none"))
            likeliest.append(logits.argmax(-1) == tokens)
        return torch.cat(nats).cpu(), torch.cat(likeliest).cpu()

    @cached_property
    def _ends_in_projection(self) -> bool:
        """True if the logits are the projected last hidden states, neither scaled nor capped."""
        project = self._network.get_output_embeddings()
        if project is None:
            return False
        batch = torch.full((1, 4), self._start, dtype=torch.int64, device=self._network.device)
        hidden = self._network.base_model(batch, use_cache=False).last_hidden_state
        logits = self._network(batch, use_cache=False).logits
        return torch.allclose(project(hidden).float(), logits.float(), equal_nan=True)

    def _reserved(self, columns: int) -> Cache:
        growing = DynamicCache(config=self._network.config)
        if not self.keeps_all_tokens:
            return growing
        return Cache(layers=[_ReservedLayer(columns) for _ in growing.layers])
