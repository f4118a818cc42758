"""Compute the answers to a batch of requests: likelihoods of given tokens, or generated text."""

from collections.abc import Sequence
from itertools import islice

import torch

from diffmegatron.data.tokenizers import Tokenizer
from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.batched_network import BatchedNetwork
from diffmegatron.evaluation.requests import Generation, Scored, Scoring

# Maximum number of tokens of a character, which has up to 4 bytes in UTF-8.
_TOKENS_PER_CHARACTER = 4


@torch.no_grad()
def score(
    network: BatchedNetwork, requests: Sequence[Scoring]
) -> list[list[Scored] | NotFiniteError]:
    """Compute the likelihoods of the continuations of several contexts in one batch.

    A row of the batch is a context, followed by one continuation without its last token.
    Continuations of a context that differ only in their last token share a row. If
    ``network.keeps_all_tokens`` is true, a context with several rows is processed only once.
    """
    if not all(context and all(continuations) for context, continuations in requests):
        raise ValueError("a request has a context or a continuation without tokens")
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    places: list[tuple[int, int]] = []
    wanted: list[int] = []
    for number, (_, continuations) in enumerate(requests):
        for continuation in continuations:
            row = rows.setdefault((number, tuple(continuation[:-1])), len(rows))
            places += [(row, place) for place in range(-len(continuation), 0)]
            wanted += continuation
    # The last token of a context is processed in every row, because it predicts the first token of
    # the continuation.
    has_shared = (
        len(rows) > len(requests)
        and network.keeps_all_tokens
        and any(len(context) > 1 for context, _ in requests)
    )
    kept = [len(context) - 1 if has_shared else 0 for context, _ in requests]
    chunks = [[*requests[number].context[kept[number] :], *more] for number, more in rows]
    if has_shared:
        contexts = [context[:-1] for context, _ in requests]
        prefixes = network.empty_rows(len(contexts), max(kept))
        network.read(prefixes, contexts)
        index = [number for number, _ in rows]
        begun = network.after(prefixes, index, max(map(len, chunks)))
    else:
        begun = network.empty_rows(len(chunks))
    found = network.read(begun, chunks, [(row, len(chunks[row]) + place) for row, place in places])
    nats, likeliest = network.score(found, torch.tensor(wanted))
    lengths = [len(each) for _, continuations in requests for each in continuations]
    scored = map(Scored, nats.split(lengths), likeliest.split(lengths))
    return [
        check_finite(list(islice(scored, len(continuations))), len(context))
        for context, continuations in requests
    ]


def check_finite(scored: list[Scored], before: int) -> list[Scored] | NotFiniteError:
    """Return ``scored``, or an error if a loss is not finite.

    ``before`` is the number of tokens before each continuation.
    """
    for nats, _ in scored:
        bad = (~nats.isfinite()).nonzero()
        if len(bad):
            place, count = before + int(bad[0]), before + len(nats)
            return NotFiniteError(f"the loss of token {place} of {count} is not finite")
    return scored


class WrittenText:
    """A text that is being generated, and the labels (allowed answers) that are still possible."""

    def __init__(self, request: Generation) -> None:
        self.request, self.labels = request, request.labels
        self.found: list[int] = []
        self.answer: list[int] | NotFiniteError = self.found
        self.has_ended = False

    def add(self, token: int | None, tokenizer: Tokenizer) -> None:
        """Process the most likely next token; ``token`` is None if a logit is not finite."""
        if token is None:
            after = len(self.request.ids) + len(self.found)
            self.answer = NotFiniteError(f"a logit after {after} tokens is not finite")
            self.has_ended = True
        elif self.labels is not None:
            self._add_label(token)
        elif token == tokenizer.end_of_document:
            self.has_ended = True
        else:
            self.found.append(token)
            stop, tail = self.request.stop, max(map(len, self.request.stop), default=0)
            text = tokenizer.decode(self.found[-_TOKENS_PER_CHARACTER * tail :]) if tail else ""
            is_stopped = any(each in text for each in stop)
            self.has_ended = is_stopped or len(self.found) == self.request.limit

    def _add_label(self, token: int) -> None:
        assert self.labels is not None
        self.found.append(token)
        self.labels = self.labels[token]
        # If only one label is still possible, the rest of it needs no forward pass.
        rest, labels = list[int](), self.labels
        while len(labels) == 1:
            ((following, labels),) = labels.items()
            rest.append(following)
        if not labels:
            self.found += rest
            self.has_ended = True


@torch.no_grad()
def generate(
    network: BatchedNetwork, requests: Sequence[Generation], tokenizer: Tokenizer
) -> list[list[int] | NotFiniteError]:
    """Generate one text per request in one batch by greedy decoding.

    All requests must have the same ``shared``, and the same first ``shared`` tokens.
    """
    shared = requests[0].shared
    chunks: list[Sequence[int]] = [request.ids[shared:] for request in requests]
    columns = max(map(len, chunks)) + max(request.limit for request in requests)
    if shared and network.keeps_all_tokens:
        prefix = network.read_prefix(requests[0].ids[:shared])
        rows = network.after(prefix, [0] * len(chunks), columns)
    else:
        chunks = [request.ids for request in requests]
        rows = network.empty_rows(len(chunks), shared + columns)
    texts = [WrittenText(request) for request in requests]
    # Texts whose rows are still in the batch.
    written = texts
    while True:
        ends = [(row, len(chunk) - 1) for row, chunk in enumerate(chunks)]
        found = network.read(rows, chunks, ends)
        logits = network.logits(found)
        are_finite = logits.isfinite().all(-1)
        for row, text in enumerate(written):
            if text.labels is not None and not text.has_ended:
                allowed = torch.tensor(sorted(text.labels), device=logits.device)
                logits[row] = torch.full_like(logits[row], -torch.inf).index_copy_(
                    0, allowed, logits[row, allowed]
                )
        # Copy to the host only once per step, because each copy waits for the device.
        likeliest = torch.stack((logits.argmax(-1), are_finite.long())).tolist()
        for text, token, is_finite in zip(written, *likeliest, strict=True):
            if not text.has_ended:
                text.add(token if is_finite else None, tokenizer)
        active = [row for row, text in enumerate(written) if not text.has_ended]
        if not active:
            return [text.answer for text in texts]
        # Dropping rows copies the cache, so do it only when at least half of the texts have ended.
        if 2 * len(active) <= len(written):
            rows.keep(active)
            written = [written[row] for row in active]
        chunks = [text.found[-1:] or text.request.ids[-1:] for text in written]
