"""Multi-needle retrieval: find the numbers of cities in a long text (LWM, Gemini 1.5)."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure
from diffmegatron.evaluation.haystack import (
    CITIES,
    HaystackPrompt,
    draw_needles,
    open_haystack,
    question,
)
from diffmegatron.evaluation.requests import Generation, ItemGenerator
from diffmegatron.evaluation.suite import Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

Share = Annotated[float, Field(ge=0, le=1)]
# (N, R): number of hidden needles, and number of needles that the question is about.
Pair = tuple[Size, Size]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACK = Field(description="text in which needles are hidden, such as books")
_TABLE = "3B, table 2"
_END = "\n"


class Retrieval(Suite):
    """Share of hidden numbers that the model finds.

    For a pair (N, R), N needles (sentences) are hidden, and the model is asked for R of their
    numbers. One of these R needles has a depth of ``depths``, and all other needles have random
    depths. A number is found if the first line of the greedy answer contains it.
    """

    name = "needle"
    direction = "higher"
    within_training = True
    title = "Multi-needle retrieval, share of numbers found"
    description = (
        "Numbers are hidden in a long text and asked for at its end. The score is the share of "
        "the requested numbers in the answer. N numbers are hidden and R are requested."
    )
    published = (
        Published("N=1 R=1, 4,096 tokens", 1.00, 1.00, _TABLE),
        Published("N=2 R=2, 4,096 tokens", 0.92, 0.85, _TABLE),
        Published("N=4 R=2, 4,096 tokens", 0.84, 0.62, _TABLE),
        Published("N=6 R=2, 4,096 tokens", 0.85, 0.55, _TABLE),
    )

    haystack: Path = HAYSTACK
    pairs: tuple[Pair, ...] = Field(default=((1, 1), (2, 2), (4, 2), (6, 2)), min_length=1)
    lengths: tuple[Size, ...] = Field(
        default=(4096,), min_length=1, description="tokens of prompt and answer"
    )
    depths: tuple[Share, ...] = Field(default=DEPTHS, min_length=1)
    samples: Count = Field(default=50, description="items of each pair, length and depth")
    answer_tokens: Size = 48

    @property
    @override
    def requests_only_free_text(self) -> bool:
        return True

    @override
    def check(self, target: Target) -> None:
        wrong = [pair for pair in self.pairs if not pair[1] <= pair[0] <= len(CITIES)]
        if wrong:
            raise UserError(
                f"needle.pairs has (N, R) = {wrong[0]}; R may be at most N, and N at most "
                f"{len(CITIES)}, the number of cities"
            )

    @override
    def items(self, target: Target) -> list[Item]:
        text = open_haystack(self.haystack, target).digest
        return [
            Item(
                f"{length}/N={needles} R={asked}/depth {depth:g}/{number}",
                length,
                (text, length, needles, asked, depth),
            )
            for length in self.lengths
            for needles, asked in self.pairs
            for depth in self.depths
            for number in range(self.samples)
        ]

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        _, length, count, asked, depth = item.content
        prompt, numbers = build_prompt(
            self.haystack,
            target,
            item.key,
            length - self.answer_tokens,
            (count, asked),
            depth,
        )
        (tokens,) = yield [Generation(prompt.ids, self.answer_tokens, (_END,))]
        answer = target.tokenizer.decode(tokens).split(_END)[0]
        found = sum(number in answer for number in numbers) / asked
        setting = {"length": length, "needles": count, "asked": asked, "depth": depth}
        return setting | {"found": found, "numbers": numbers, "answer": answer}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        needles, asked, length = record["needles"], record["asked"], record["length"]
        return {f"N={needles} R={asked}, {length:,} tokens": Mean(record["found"])}

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        figure.set_size_inches(3.2 * len(self.pairs), 2.8 * len(records))
        grid = figure.subplots(len(records), len(self.pairs), squeeze=False)
        for row, (name, of_target) in zip(grid, records.items(), strict=True):
            for axes, (needles, asked) in zip(row, self.pairs, strict=True):
                image = axes.imshow(self._table(of_target, needles, asked), vmin=0, vmax=1)
                axes.set(title=f"{name}: N={needles} R={asked}", xlabel="tokens", ylabel="depth")
                axes.set_xticks(range(len(self.lengths)), [f"{each:,}" for each in self.lengths])
                axes.set_yticks(range(len(self.depths)), [f"{each:.0%}" for each in self.depths])
        figure.colorbar(image, ax=grid, label="share found")
        return True

    def _table(self, records: Records, needles: int, asked: int) -> np.ndarray:
        """Return the mean share of numbers found, [depths, lengths]; NaN where there is no item."""
        cells: dict[tuple[float, int], list[float]] = defaultdict(list)
        for record in records:
            if (record["needles"], record["asked"]) == (needles, asked):
                cells[record["depth"], record["length"]].append(record["found"])
        return np.array(
            [
                [np.mean(cells.get((depth, length), [np.nan])) for length in self.lengths]
                for depth in self.depths
            ]
        )


def build_prompt(
    haystack: Path, target: Target, key: str, length: int, pair: Sequence[int], depth: float
) -> tuple[HaystackPrompt, list[str]]:
    """Return the prompt of an item, and the numbers to find.

    Args:
        key: key of the item, which seeds its random choices.
        length: number of tokens of the prompt.
        pair: number of needles to hide, and number of needles to find.
        depth: share of the text before the first needle, from 0 to 1. Other depths are random.
    """
    count, asked = pair
    draw = random.Random(key)
    needles = draw_needles(count, depth, draw)
    cities = [needle.city for needle in needles[:asked]]
    draw.shuffle(cities)
    prompt = open_haystack(haystack, target).build_prompt(needles, question(cities), length, draw)
    return prompt, [needle.number for needle in needles[:asked]]
