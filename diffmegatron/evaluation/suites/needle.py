"""Suites that hide sentences (needles) in a long text (haystack); a needle has a number to find.

The suite ``needle`` asks for the numbers, as in the reports on LWM and Gemini 1.5. The suite
``needle-attention`` measures the attention to a needle (Differential Transformer, Ye et al., table
3).
"""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.captured_attention import LayerAttention, watch_attention
from diffmegatron.evaluation.figures import Figure, plot_maps
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation, ItemGenerator
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import read_texts
from diffmegatron.files import format_path
from diffmegatron.section import Count, Size

CITIES = re.findall(
    r"\w+",
    "Accra Adelaide Algiers Amsterdam Ankara Athens Auckland Baghdad Bangkok Barcelona Beirut "
    "Belgrade Bergen Berlin Bogota Bologna Boston Brisbane Brussels Bucharest Budapest Cairo "
    "Caracas Casablanca Chicago Copenhagen Dakar Dallas Delhi Denver Dhaka Dublin Durban "
    "Edinburgh Florence Geneva Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Karachi "
    "Kigali Kinshasa Krakow Lagos Lahore Lima Lisbon London Lusaka Lyon Madrid Manila Marseille "
    "Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Ottawa Paris "
    "Perth Porto Prague Quito Reykjavik Riga Rome Santiago Seattle Seoul Singapore Sofia "
    "Stockholm Sydney Tallinn Tehran Tokyo Toronto Tunis Turin Valencia Vancouver Vienna "
    "Vilnius Warsaw Zagreb Zurich",
)
_DIGITS = 7
# A sentence with the space after it, or 1,000 characters if no sentence ends within them.
_SENTENCE = re.compile(r"(?s).{1,1000}?(?:[.!?]['\")\]]*\s+|\Z)|.{1,1000}")


class Needle(NamedTuple):
    """A sentence to hide, which assigns a number to a city.

    ``depth`` is the share of the haystack before the sentence.
    """

    city: str
    number: str
    depth: float

    @property
    def sentence(self) -> str:
        """Text of the sentence, with a space at its end."""
        return f"The special magic {self.city} number is {self.number}. "


class HaystackPrompt(NamedTuple):
    """A prompt with hidden needles.

    Attributes:
        ids: ids of the start token, the haystack with its needles, and the question.
        spans: (first position, position after the last) of each needle in ``ids``, in the order in
            which the needles were given.
        haystack_end: position in ``ids`` at which the question begins.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    haystack_end: int


def draw_needles(count: int, depth: float, draw: random.Random) -> list[Needle]:
    """Return ``count`` needles with different cities and numbers.

    The first needle has the depth ``depth``, and the others have random depths.
    """
    cities = draw.sample(CITIES, count)
    numbers = draw.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)
    depths = [depth, *(draw.random() for _ in range(count - 1))]
    return [Needle(*each) for each in zip(cities, map(str, numbers), depths, strict=True)]


def question(cities: Sequence[str]) -> str:
    """Return the question for the numbers of ``cities``, and the beginning of its answer.

    Without this beginning, a pretrained model may write any text, and a chat model may end at once.
    """
    listed = " and ".join(cities)
    one = len(cities) == 1
    number, ask, are = ("number", "What is", "is") if one else ("numbers", "What are", "are")
    return (
        f"\n\nQuestion: {ask} the special magic {number} for {listed}? Give no information from "
        f"outside the text above.\nAnswer: The special magic {number} for {listed} {are}"
    )


class Haystack:
    """A text in which needles are hidden; it is encoded with the tokenizer of ``target``."""

    def __init__(self, path: Path, target: Target) -> None:
        self._path, self._target = path, target
        self._sentences: list[str] = []
        hashed = hashlib.sha256()
        for text in read_texts(path):
            self._sentences += _SENTENCE.findall(text)
            hashed.update(f"{len(text)}:{text}".encode())
        self.digest = hashed.hexdigest()
        if not self._sentences:
            raise UserError(f"--haystack {format_path(path)} has no text")
        self._encode = cache(target.encode)

    def build_prompt(
        self, needles: Sequence[Needle], asked: str, length: int, draw: random.Random
    ) -> HaystackPrompt:
        """Return a prompt of exactly ``length`` tokens that ends with the question ``asked``.

        The haystack begins with a random sentence. After the last sentence of the text, it
        continues with the first one. A needle is inserted at the sentence boundary nearest to its
        depth.
        """
        sentences = [self._target.encode(needle.sentence) for needle in needles]
        ending = self._target.encode(asked)
        space = length - 1 - len(ending) - sum(map(len, sentences))
        if space < 1:
            raise UserError(
                f"{len(needles)} needles and their question have {length - 1 - space} tokens in "
                f"{self._target.name}, and the length is {length}; give a larger length"
            )
        pieces = self._pieces(space, draw)
        starts = [0, *accumulate(map(len, pieces))]
        places = [min(starts, key=lambda start: abs(start - n.depth * space)) for n in needles]
        ids, spans = [self._target.start_token], {}
        order = sorted(range(len(needles)), key=lambda number: (places[number], number))
        for start, piece in zip(starts, [*pieces, []], strict=True):
            for number in order:
                if places[number] == start:
                    spans[number] = (len(ids), len(ids) + len(sentences[number]))
                    ids += sentences[number]
            ids += piece
        return HaystackPrompt([*ids, *ending], [spans[n] for n in range(len(needles))], len(ids))

    def _pieces(self, space: int, draw: random.Random) -> list[list[int]]:
        """Return the ids of consecutive sentences from a random one on, ``space`` ids in total."""
        first, pieces, left = draw.randrange(len(self._sentences)), [], space
        for sentence in (*self._sentences[first:], *self._sentences[:first]):
            if ids := self._encode(sentence)[:left]:
                pieces.append(ids)
                left -= len(ids)
            if not left:
                return pieces
        raise UserError(
            f"--haystack {format_path(self._path)} has {space - left} tokens in "
            f"{self._target.name}, and the prompt needs {space}; give a longer text, or a shorter "
            "length"
        )


# Consecutive prompts use the same haystack.
open_haystack = lru_cache(maxsize=1)(Haystack)

Share = Annotated[float, Field(ge=0, le=1)]
# (N, R): number of hidden needles, and number of needles that the question is about.
Pair = tuple[Size, Size]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
HAYSTACK = Field(description="text in which needles are hidden, such as books")
_END = "\n"
_SHARES = {
    "answer": ((0.27, 0.30, 0.31, 0.32, 0.40), (0.03, 0.03, 0.03, 0.07, 0.09)),
    "noise": ((0.01, 0.02, 0.02, 0.02, 0.01), (0.51, 0.54, 0.52, 0.49, 0.49)),
}


class Retrieval(Suite):
    """Share of hidden numbers that the model finds.

    The haystack is a part of the text that begins at a random sentence. N sentences (needles) of
    this form are hidden in it:

        The special magic Oslo number is 4190873.

    The first needle is inserted at the beginning of a sentence, as near as possible to one of
    ``depths``, the share of the haystack before it. The others are inserted at random depths. The
    question below is about the first needle and R - 1 others. All cities and numbers of an item
    differ. Decoding is greedy, up to the end of the line. The score is the share of the R numbers
    that the answer contains.

    *Deviations*: the paper does not give its prompt. The task is from LWM (Liu et al.), whose
    prompt does not contain the beginning of the answer. Without it, models may end the text or
    write something else. Each new token needs a forward pass over the whole text within training.
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
        Published("N=1 R=1, 4,096 tokens", 1.00, 1.00, "3B, table 2"),
        Published("N=2 R=2, 4,096 tokens", 0.92, 0.85, "3B, table 2"),
        Published("N=4 R=2, 4,096 tokens", 0.84, 0.62, "3B, table 2"),
        Published("N=6 R=2, 4,096 tokens", 0.85, 0.55, "3B, table 2"),
    )

    haystack: Path = HAYSTACK
    pairs: tuple[Pair, ...] = Field(
        default=((1, 1), (2, 2), (4, 2), (6, 2)),
        min_length=1,
        description="(N, R): hidden needles, and needles that the question is about",
    )
    lengths: tuple[Size, ...] = Field(
        default=(4096,), min_length=1, description="tokens of prompt and answer"
    )
    depths: tuple[Share, ...] = Field(
        default=DEPTHS, min_length=1, description="share of the haystack before the first needle"
    )
    samples: Count = Field(default=50, description="items of each pair, length and depth")
    answer_tokens: Size = Field(default=48, description="largest number of tokens to generate")

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
        room, pair = length - self.answer_tokens, (count, asked)
        prompt, numbers = build_prompt(self.haystack, target, item.key, room, pair, depth)
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

        def share(*place: float) -> float:
            found = [
                record["found"]
                for record in records
                if (record["needles"], record["asked"], record["depth"], record["length"]) == place
            ]
            return float(np.mean(found)) if found else np.nan

        return np.array(
            [
                [share(needles, asked, depth, length) for length in self.lengths]
                for depth in self.depths
            ]
        )


def build_prompt(
    haystack: Path, target: Target, key: str, length: int, pair: Sequence[int], depth: float
) -> tuple[HaystackPrompt, list[str]]:
    """Return the prompt of an item, and the numbers to find.

    Args:
        key: key of the item, which seeds its random choices.
        pair: number of needles to hide, and number of needles to find.
        depth: share of the haystack before one of the needles to find. All other needles have
            random depths.
    """
    count, asked = pair
    draw = random.Random(key)
    needles = draw_needles(count, depth, draw)
    cities = [needle.city for needle in needles[:asked]]
    draw.shuffle(cities)
    prompt = open_haystack(haystack, target).build_prompt(needles, question(cities), length, draw)
    return prompt, [needle.number for needle in needles[:asked]]


class NeedleAttention(Suite):
    """Shares of the last token's attention that fall on the needle and on the rest of the text.

    The suite reads the row of the prompt's last token in every head's map after subtraction.
    ``answer`` is the share of the row on the sentence of the needle that the question is about, and
    ``noise`` the share on the rest of the haystack, including other needles. The start token and
    the question belong to neither. *Deviation*: the paper writes "normalised". Here, shares are
    relative to the sum of absolute values, because entries may be negative.
    """

    name = "needle-attention"
    reads_attention = True
    title = "Attention to the answer and to noise"
    description = (
        "The suite divides the last token's attention into a share on a hidden number that is "
        "asked for (answer) and one on the rest of the text (noise), as means over heads and "
        "layers. The first token and the question have the remainder. The first measure covers all "
        "depths. Depth 0% is the beginning of the text and 100% its end."
    )
    published = tuple(
        Published(f"{part}, depth {depth:.0%}", differential, transformer, "3B, table 3")
        for part, values in _SHARES.items()
        for depth, differential, transformer in zip(DEPTHS, *values, strict=True)
    )

    haystack: Path = HAYSTACK
    needles: Size = Field(default=1, description="number of needles; the question is about one")
    length: Size = Field(default=4096, description="tokens of the prompt")
    depths: tuple[Share, ...] = Field(
        default=DEPTHS, min_length=1, description="share of the haystack before the needle"
    )
    samples: Count = Field(default=20, description="items of each depth")

    @override
    def items(self, target: Target) -> list[Item]:
        text = open_haystack(self.haystack, target).digest
        return [
            Item(f"depth {depth:g}/{number}", self.length, (text, depth))
            for depth in self.depths
            for number in range(self.samples)
        ]

    @override
    @torch.no_grad()
    def score(self, model: Model, item: Item) -> Record:
        """Return the depth, and the shares of answer and noise as lists [layers][heads]."""
        _, depth = item.content
        prompt, _ = build_prompt(
            self.haystack, model.target, item.key, self.length, (self.needles, 1), depth
        )
        first, end = prompt.spans[0]
        answer, noise = [], []

        def watch(layer: LayerAttention) -> None:
            row = layer.maps(layer.rows - 1, layer.rows)[:, 0].abs()
            total = row.sum(1)
            if not (total.isfinite() & (total > 0)).all():
                raise NotFiniteError(
                    f"a row of attention of layer {layer.number + 1} is zero or not finite"
                )
            own = row[:, first:end].sum(1)
            answer.append((own / total).tolist())
            noise.append(((row[:, 1 : prompt.haystack_end].sum(1) - own) / total).tolist())

        with watch_attention(model, watch):
            model.network.base_model(model.batch(prompt.ids), use_cache=False)
        return {"depth": depth, "answer": answer, "noise": noise}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        shares = {part: float(np.mean(record[part])) for part in ("answer", "noise")}
        depth = f"depth {record['depth']:.0%}"
        # Either share alone can change because the first token has more or less attention.
        return {
            "answer / (answer + noise)": Mean(shares["answer"], sum(shares.values())),
            **{f"{part}, {depth}": Mean(share) for part, share in shares.items()},
        }

    @override
    def better(self, measure: str) -> Direction:
        return "higher" if measure.startswith("answer") else "lower"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        figure.set_size_inches(4.5 * len(records), 7.5)
        panels = figure.subfigures(2, 1, squeeze=False)[:, 0]
        for panel, part in zip(panels, ("answer", "noise"), strict=True):
            tables = {
                f"{name}: {part}": np.mean([record[part] for record in of_target], axis=0)
                for name, of_target in records.items()
            }
            grid = panel.subplots(1, len(records), squeeze=False)[0]
            quantity = "share of the last token's attention"
            plot_maps(panel, grid, tables, xlabel="head", ylabel="layer", quantity=quantity)
        return True
