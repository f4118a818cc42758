"""EleutherAI's lm-eval as a library: its tasks on rows of ours, its requests to a network of ours.

What imports this imports lm-eval (the extra ``evaluation``).
"""

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple, cast

import lm_eval.tasks
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.utils import resolve_max_length
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.multiple_choice import Row
from diffmegatron.evaluation.requests import Scored, Scoring
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import clipped, shown

# Folders of the library that hold the tasks: reading all it has takes seconds.
_FOLDERS = ("arc", "hellaswag", "openbookqa", "piqa", "super_glue/boolq", "winogrande")


class Question(NamedTuple):
    """What lm-eval asks about one row.

    Attributes:
        requests: contexts and continuations, whose likelihoods it wants.
        row: as its task takes it.
    """

    requests: list[tuple[str, str]]
    row: Row


class Task:
    """A task of lm-eval's on local rows, with its own prompts, metrics and draws of examples.

    Args:
        name: of the task.
        rows: that are asked.
        examples: that ``shots`` are drawn from.
        shots: examples before a question.
    """

    def __init__(self, name: str, rows: Sequence[Row], examples: Sequence[Row], shots: int) -> None:
        asked = Dataset.from_list(list(rows))
        drawn = Dataset.from_list(list(examples)) if examples else asked.select([])
        splits = {"train": drawn, "validation": asked, "test": asked}

        def load(**_: object) -> dict[str, Dataset]:
            return splits

        root = Path(lm_eval.tasks.__file__).parent
        with _quiet():
            manager = TaskManager(
                include_defaults=False, include_path=[root / each for each in _FOLDERS]
            )
            task = {"task": name, "custom_dataset": load}
            self._task = manager.load({"group": "local", "task": [task]})["tasks"][name]
            self._task.set_config("num_fewshot", shots)
            # As simple_evaluate and the command do.
            self._task.set_fewshot_seed(DEFAULT_OTHER_SEED)

    def questions(self, number: int) -> list[Question]:
        """The first rows as they are asked: examples are drawn for one after the other."""
        with _quiet():
            self._task.build_all_requests(limit=number)
        found: dict[int, Question] = {}
        for request in self._task.instances:
            question = found.setdefault(request.doc_id, Question([], request.doc))
            question.requests.append(request.args)
        return list(found.values())

    def metrics(self, row: Row, likelihoods: Sequence[tuple[float, bool]]) -> dict[str, float]:
        """What the answers to a row's requests come to, such as ``acc`` and ``acc_norm``."""
        found = self._task.process_results(row, list(likelihoods))
        return {name: float(value) for name, value in found.items()}


class Network(TemplateLM):
    """A target as lm-eval asks it: its tokenizer with the special tokens that it adds by itself.

    Args:
        model: whose network computes the likelihoods.
        tokenizer: of :func:`load_tokenizer`.

    Attributes:
        cut: requests so far that were longer than the context, and lost their beginning.
    """

    def __init__(self, model: Model, tokenizer: Any) -> None:
        super().__init__()
        self._model, self.tokenizer, self.cut = model, tokenizer, 0
        self._max_length = resolve_max_length(model.target.config, self.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """The ids of a text, by default with the tokens that the tokenizer adds."""
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, verbose=False, **chosen)
        return ids

    def likelihoods(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations of contexts, and whether each is the likeliest.

        Raises:
            UserError: a continuation is longer than the context of the target.
            NotFiniteError: a log-likelihood is not.
        """
        asked = [Instance("loglikelihood", {}, each, 0) for each in requests]
        found: list[tuple[float, bool]] = self.loglikelihood(asked, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Of continuations: the logarithm, and whether the likeliest token is always the next."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(requests):
            by_context.setdefault(self._shortened(*request), []).append(number)
        asked = [
            Scoring(context, [requests[number][2] for number in numbers])
            for context, numbers in by_context.items()
        ]
        found: dict[int, tuple[float, bool]] = {}
        places = list(by_context.values())
        for place, answer in self._model.answers(asked):
            if isinstance(answer, NotFiniteError):
                raise answer
            scored = cast(list[Scored], answer)
            for number, (nats, likeliest) in zip(places[place], scored, strict=True):
                found[number] = (-float(nats.double().sum()), bool(likeliest.all()))
        return [found[number] for number in range(len(requests))]

    def _shortened(
        self, strings: tuple[str, str], before: list[int], after: list[int]
    ) -> tuple[int, ...]:
        """Return the end of a context that fits into the network beside a continuation."""
        if len(after) > self._max_length:
            raise UserError(
                f"the choice {clipped(repr(strings[1]))} has {len(after)} tokens of "
                f"{self._model.target.name}, whose context is {self._max_length:,}"
            )
        # Nothing follows the last token, which the network does not read.
        room = self._max_length + 1 - len(after)
        self.cut += len(before) > room
        return (*before[-room:],)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Not asked by any task of multiple choice."""
        raise NotImplementedError("tasks of multiple choice ask for likelihoods of choices alone")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Not asked by any task of multiple choice."""
        raise NotImplementedError("tasks of multiple choice ask for likelihoods of choices alone")


def longest_choice(requests: Sequence[tuple[str, str]], tokenizer: Any, context: float) -> int:
    """Return the most tokens of a choice among ``requests`` if ``context`` is shorter, else 0.

    A token has one byte or more, so that short choices need not be tokenised. The tokens of a
    choice are those that lm-eval counts: what the choice, with the space before it, adds to the
    tokens of its prompt.
    """
    longest = 0
    for prompt, choice in requests:
        before = prompt.rstrip()
        if len((prompt[len(before) :] + choice).encode()) > context:
            whole, start = (
                tokenizer.encode(text, verbose=False) for text in (prompt + choice, before)
            )
            longest = max(longest, len(whole) - len(start))
    return longest if longest > context else 0


def load_tokenizer(target: Target) -> Any:
    """As ``transformers`` makes it, which lm-eval's own command uses too.

    Raises:
        UserError: it cannot be made.
    """
    try:
        return AutoTokenizer.from_pretrained(
            target.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers has no narrower one for what it does not like
        raise UserError(
            f"{shown(target.folder)} has no tokenizer that transformers can load: "
            f"{clipped(str(error))}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library says of settings that are meant so, and its lines of progress."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
