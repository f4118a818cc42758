"""Needles in a haystack: sentences with numbers of cities, hidden in a text (Liu et al., LWM)."""

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
from diffmegatron.files import shown

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
# What ends a sentence, its space with it; text without any is cut.
_SENTENCE = re.compile(r"(?s).{1,1000}?(?:[.!?]['\")\]]*\s+|\Z)|.{1,1000}")


class Needle(NamedTuple):
    """A city and its number, and the share of the haystack before it."""

    city: str
    number: str
    depth: float

    @property
    def sentence(self) -> str:
        """As it is written in the text."""
        return f"The special magic {self.city} number is {self.number}. "


class Hidden(NamedTuple):
    """A prompt.

    Attributes:
        ids: the start token, the haystack with its needles, and the question.
        spans: where each needle begins and ends in them, in the order that they were given in.
        haystack_end: where the question begins.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    haystack_end: int


def draw_needles(count: int, depth: float, draw: random.Random) -> list[Needle]:
    """Needles of cities and numbers that differ, the first at ``depth`` and others anywhere."""
    cities = draw.sample(CITIES, count)
    numbers = draw.sample(range(10 ** (_DIGITS - 1), 10**_DIGITS), count)
    depths = [depth, *(draw.random() for _ in range(count - 1))]
    return [Needle(*each) for each in zip(cities, map(str, numbers), depths, strict=True)]


def question(cities: Sequence[str]) -> str:
    """What is asked after the haystack, and how the answer begins.

    Without the beginning a model that was only pretrained may go on with anything, and one that was
    tuned for chats may end at once.
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
    """The haystack of all items of a target, read once."""
    return Haystack(path, target)


class Haystack:
    """A text to hide needles in, in sentences of a target's tokens.

    Args:
        path: as :func:`~diffmegatron.evaluation.text.read_texts` takes it.
        target: whose tokens count.

    Attributes:
        digest: of the text.

    Raises:
        UserError: it has no text.
    """

    def __init__(self, path: Path, target: Target) -> None:
        self._path, self._target = path, target
        self.digest = digest(read_texts(path))
        self._sentences = [
            sentence for text in read_texts(path) for sentence in _SENTENCE.findall(text)
        ]
        if not self._sentences:
            raise UserError(f"--haystack {shown(path)} has no text")
        self._ids: dict[int, list[int]] = {}

    def hide(
        self, needles: Sequence[Needle], asked: str, length: int, draw: random.Random
    ) -> Hidden:
        """A prompt of exactly ``length`` tokens, from a sentence anywhere in the text on.

        A needle is put before the sentence that begins nearest to its depth; where the text ends
        it goes on with its beginning.

        Raises:
            UserError: the text is too short, or the needles and the question too long.
        """
        sentences = [self._target.encode(needle.sentence) for needle in needles]
        ending = self._target.encode(asked)
        space = length - 1 - len(ending) - sum(map(len, sentences))
        if space < 1:
            raise UserError(
                f"{len(needles)} needles and their question have {length - 1 - space} tokens of "
                f"{self._target.name}; give lengths of more than that, not {length}"
            )
        pieces = self._pieces(space, draw)
        starts = [0, *accumulate(map(len, pieces))]
        places = [min(starts, key=lambda start: abs(start - n.depth * space)) for n in needles]
        ids, spans = [self._target.start], {}
        order = sorted(range(len(needles)), key=lambda number: (places[number], number))
        for start, piece in zip(starts, [*pieces, []], strict=True):
            for number in order:
                if places[number] == start:
                    spans[number] = (len(ids), len(ids) + len(sentences[number]))
                    ids += sentences[number]
            ids += piece
        return Hidden([*ids, *ending], [spans[n] for n in range(len(needles))], len(ids))

    def _pieces(self, space: int, draw: random.Random) -> list[list[int]]:
        """Sentences in order that have ``space`` tokens together; the last is cut."""
        first, pieces, left = draw.randrange(len(self._sentences)), [], space
        for step in range(len(self._sentences)):
            if ids := self._encoded((first + step) % len(self._sentences)):
                pieces.append(ids[:left])
                left -= len(pieces[-1])
            if not left:
                return pieces
        raise UserError(
            f"--haystack {shown(self._path)} has {space - left} tokens of {self._target.name}, and "
            f"{space} are to be filled; give a longer text, or shorter lengths"
        )

    def _encoded(self, number: int) -> list[int]:
        if number not in self._ids:
            self._ids[number] = self._target.encode(self._sentences[number])
        return self._ids[number]
