"""Prompts for needle retrieval: sentences (needles) are hidden in a long text, the haystack."""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from diffmegatron.errors import UserError
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import digest, read_texts
from diffmegatron.files import format_path

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
    """A sentence to hide, which states the number of a city.

    ``depth`` is the wanted share of the haystack's tokens before the sentence, from 0 to 1.
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
        spans: for each given needle, its first position in ``ids`` and the position after its last.
        haystack_end: position in ``ids`` at which the question begins.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    haystack_end: int


def draw_needles(count: int, depth: float, draw: random.Random) -> list[Needle]:
    """Return different needles: the first has the given depth, and the others random depths."""
    cities = draw.sample(CITIES, count)
    numbers = draw.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)
    depths = [depth, *(draw.random() for _ in range(count - 1))]
    return [Needle(*each) for each in zip(cities, map(str, numbers), depths, strict=True)]


def question(cities: Sequence[str]) -> str:
    """Return the question about some cities, followed by the beginning of its answer.

    Without this beginning, a pretrained model may write any text, and a chat model may end at once.
    """
    listed = " and ".join(cities)
    one = len(cities) == 1
    number, ask, are = ("number", "What is", "is") if one else ("numbers", "What are", "are")
    return (
        f"\n\nQuestion: {ask} the special magic {number} for {listed}? Give no information from "
        f"outside the text above.\nAnswer: The special magic {number} for {listed} {are}"
    )


@lru_cache(maxsize=1)
def open_haystack(path: Path, target: Target) -> "Haystack":
    """Return the text in ``path`` as a haystack; the last haystack is cached."""
    return Haystack(path, target)


class Haystack:
    """A text in which needles are hidden: its sentences, encoded for a target."""

    def __init__(self, path: Path, target: Target) -> None:
        self._path, self._target = path, target
        self.digest = digest(read_texts(path))
        self._sentences = [
            sentence for text in read_texts(path) for sentence in _SENTENCE.findall(text)
        ]
        if not self._sentences:
            raise UserError(f"--haystack {format_path(path)} has no text")
        self._ids: dict[int, list[int]] = {}

    def build_prompt(
        self, needles: Sequence[Needle], asked: str, length: int, draw: random.Random
    ) -> HaystackPrompt:
        """Return a prompt of exactly ``length`` tokens that ends with the question ``asked``.

        The haystack begins with a random sentence. The first sentence of the text follows its last
        one. Each needle is inserted at the boundary between sentences that is nearest to its depth.
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
        for step in range(len(self._sentences)):
            if ids := self._encoded((first + step) % len(self._sentences)):
                pieces.append(ids[:left])
                left -= len(pieces[-1])
            if not left:
                return pieces
        raise UserError(
            f"--haystack {format_path(self._path)} has {space - left} tokens in "
            f"{self._target.name}, and the prompt needs {space}; give a longer text, or a shorter "
            "length"
        )

    def _encoded(self, number: int) -> list[int]:
        if number not in self._ids:
            self._ids[number] = self._target.encode(self._sentences[number])
        return self._ids[number]
