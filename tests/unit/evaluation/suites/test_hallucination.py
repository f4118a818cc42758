"""Tests of the suite ``hallucination``: datasets, prompts, verdicts, judges and restarts."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pyarrow
import pyarrow.parquet
import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation import judge_endpoint
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.judge import Verdict, open_judge, parse_verdict
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.suites.hallucination import (
    DATASETS,
    JUDGE_PROMPT,
    Hallucination,
    Passage,
    judge_question,
)
from diffmegatron.evaluation.targets import find_targets
from tests.paths import DOCS
from tests.pretrained import write_pretrained
from tests.unit.evaluation.stand_ins import answering

PAGE = DOCS / "reference/suites.md"
SECRET = "sk-that-nobody-may-see"
FILES = {
    "xsum_test": [
        {"document": "A cat sat.", "summary": "A cat.", "id": "1"},
        {"document": "It rained all day in the north.", "summary": "Rain.", "id": "2"},
    ],
    "cnn_dailymail_test": [{"article": "Long ago.", "highlights": "Old .", "id": "x"}],
    "multi_news_test": [
        {"document": "One. NEWLINE_CHAR Two. ||||| Three.", "summary": "Numbers."},
    ],
    "qasper": [
        {
            "input": "Which data?",
            "context": "We use letters.",
            "answers": ["letters", "some letters"],
            "length": 3,
            "dataset": "qasper",
            "language": "en",
            "all_classes": None,
            "_id": "a",
        }
    ],
    "hotpotqa": [{"input": "Who?", "context": "Passage 1:\nAnn.", "answers": ["Ann"]}],
    "2wikimqa": [{"input": "Where?", "context": "Passage 1:\nOslo.", "answers": ["Oslo"]}],
    "leval_scientific_qa": [
        {"input": "Text.", "instructions": ["A?", "B?"], "outputs": ["a", "b"], "source": "s"}
    ],
    "leval_news_summ": [{"input": "News.", "instructions": ["Summarize."], "outputs": ["n"]}],
}
SETTINGS = ["hallucination.context=400", "hallucination.answer_tokens=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hallucination")
    write_pretrained(found / "plain", "llama 2", max_position_embeddings=4096)
    for name, rows in FILES.items():
        (found / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


class Endpoint:
    """Local HTTP server that acts as the judge.

    Attributes:
        asked: path, headers and JSON body of each request.
        reply: function that maps a question to the response: the text of a chat completion (str),
            a raw body (bytes) or an HTTP status (int).
        url: base URL of the server.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, dict]] = []
        self.reply: Callable[[str], str | bytes | int] = lambda _: "Conclusion: True"
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.asked.append((self.path, dict(self.headers), body))
                reply = endpoint.reply(body["messages"][0]["content"])
                if isinstance(reply, str):
                    message = {"role": "assistant", "content": reply}
                    reply = json.dumps({"id": "1", "choices": [{"message": message}]}).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Location", "http://elsewhere.invalid/")
                self.end_headers()
                self.wfile.write(reply if isinstance(reply, bytes) else SECRET.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(judge_endpoint, "_PAUSES", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    open_judge.cache_clear()
    found = Endpoint()
    yield found
    found.close()
    open_judge.cache_clear()


@pytest.fixture
def measure(folder: Path, tmp_path: Path) -> Callable[..., dict]:
    def run(*settings: str, tasks: str = "[xsum, qasper]", out: str = "out") -> dict:
        given = [*SETTINGS, f"hallucination.tasks={tasks}"]
        given += [f"hallucination.{each}" for each in settings]
        options = EvaluateSettings(data_dir=folder)
        evaluate([folder / "plain"], ["hallucination"], tmp_path / out, options, given)
        found = json.loads((tmp_path / out / "results.json").read_text())
        return found["suites"]["hallucination"]

    return run


def values(found: dict) -> dict[str, float]:
    return {name: each["targets"]["plain"]["value"] for name, each in found["measures"].items()}


def lines(out: Path) -> list[dict]:
    content = (out / "hallucination/plain.jsonl").read_text()
    return [json.loads(line) for line in content.splitlines()[1:]]


# Files


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("xsum", ("A cat sat.", "", ("A cat.",))),
        ("cnn_dailymail", ("Long ago.", "", ("Old .",))),
        ("multi_news", ("One. \n Two. \n\n Three.", "", ("Numbers.",))),
        ("qasper", ("We use letters.", "Which data?", ("letters", "some letters"))),
        ("hotpotqa", ("Passage 1:\nAnn.", "Who?", ("Ann",))),
        ("2wikimqa", ("Passage 1:\nOslo.", "Where?", ("Oslo",))),
        ("leval_scientific_qa", ("Text.", "A?", ("a",))),
        ("leval_news_summ", ("News.", "", ("n",))),
    ],
)
def test_published_formats_are_read(name, expected, folder):
    assert DATASETS[name].examples(folder, 5)[0] == Passage(*expected)
    assert len(DATASETS[name].examples(folder, 1)) == 1


def test_parquet_is_read_as_well(folder, tmp_path):
    rows = FILES["xsum_test"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "xsum_test.parquet")
    assert DATASETS["xsum"].examples(tmp_path, 9) == DATASETS["xsum"].examples(folder, 9)
    columns = pyarrow.Table.from_pylist([{"document": "a"}])
    pyarrow.parquet.write_table(columns, tmp_path / "xsum_test.parquet")
    with pytest.raises(UserError, match=r"xsum_test\.parquet at line 1: key .summary. is missing"):
        DATASETS["xsum"].examples(tmp_path, 1)


def test_a_question_without_an_answer_is_an_error(tmp_path):
    row = {"input": "Text.", "instructions": ["A?", "B?"], "outputs": ["a"]}
    (tmp_path / "leval_scientific_qa.jsonl").write_text(json.dumps(row) + "\n")
    (name,) = (key for key, each in DATASETS.items() if each.file == "leval_scientific_qa.jsonl")
    with pytest.raises(UserError, match="at line 1: 2 instructions and 1 outputs; give an output"):
        DATASETS[name].examples(tmp_path, 1)


@pytest.mark.parametrize("name", DATASETS)
def test_missing_foreign_and_empty_files_are_errors(name, tmp_path):
    dataset = DATASETS[name]
    with pytest.raises(
        UserError, match=rf"{dataset.file} does not exist .*; it must be (rows|lines)"
    ):
        DATASETS[name].examples(tmp_path, 1)
    path = tmp_path / dataset.file
    path.write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="at line 1 is damaged and cannot be used"):
        DATASETS[name].examples(tmp_path, 1)
    path.write_text("")
    with pytest.raises(UserError, match="is empty; it must be"):
        DATASETS[name].examples(tmp_path, 1)


# Prompts


def test_prompts_are_those_of_the_docs(folder, measure, monkeypatch, tmp_path):
    text, prompts = PAGE.read_text(), []
    assert JUDGE_PROMPT.rstrip() in text

    def writes(model, request):
        assert request.stop == ("\n\n",) and request.limit == 8
        prompts.append(model.target.tokenizer.decode(request.ids[1:]))
        return list(b" A text.\n\nMore")

    monkeypatch.setattr(Model, "answers", answering(writes))
    found = measure()
    assert found["measures"] == {}
    assert "3 texts are written and none is judged; give hallucination.judge" in found["not_run"][0]
    summary, _, answer = prompts
    assert summary == (
        "Document: A cat sat.\n\nWrite a short summary of the document, with nothing that it does "
        "not say.\nSummary:"
    )
    assert answer == (
        "Document: We use letters.\n\nAnswer the question from the document alone.\n"
        "Question: Which data?\nAnswer:"
    )
    for prompt in (summary, answer):
        assert prompt.partition("\n\n")[2].rpartition("\n")[0].splitlines()[0] in text
    records = lines(tmp_path / "out")
    assert [record["text"] for record in records] == ["A text."] * 3
    asked = judge_question(records[2])
    assert "Question: Which data?\n\nReference answer: letters / some letters\n\n" in asked
    assert "answer to judge: A text." in asked
    assert "Reference summary: A cat.\n\n" in judge_question(records[0])
    assert "Question:" not in judge_question(records[0])


def test_long_documents_lose_their_middle(folder):
    (target,) = find_targets([folder / "plain"], folder)
    suite = Hallucination(data_dir=folder, context=200, answer_tokens=20)
    document = "".join(f"{number:04}" for number in range(200))
    ids, kept = suite._prompt(target, Passage(document, "Why?", ("a",)))
    assert 178 <= len(ids) <= 180
    first, _, last = kept.partition("\n[...]\n")
    assert document.startswith(first)
    assert document.endswith(last)
    assert len(first) == len(last) > 20
    assert f"Document: {kept}\n\nAnswer" in target.tokenizer.decode(ids)
    ids, kept = suite._prompt(target, Passage("short", "Why?", ("a",)))
    assert kept == "short"


# Verdicts


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is fine.\nConclusion: True", Verdict(True, [])),
        ("**Conclusion: False**\nProblematic Spans: ['a', \"b's\"]", Verdict(False, ["a", "b's"])),
        ("conclusion: false.\nProblematic spans: [1, 'x']", Verdict(False, ["x"])),
        ("Conclusion: False\nProblematic Spans: [__import__('os')]", Verdict(False, [])),
        ("Conclusion: False\nProblematic Spans: [[[[", Verdict(False, [])),
        ("Conclusion: True or False", Verdict(None, [])),
        ("Conclusion: True\nConclusion: False", Verdict(None, [])),
        ("Conclusion: Truest", Verdict(None, [])),
        ("My conclusion: True", Verdict(None, [])),
        ("True", Verdict(None, [])),
        ("", Verdict(None, [])),
    ],
)
def test_verdicts_are_read_strictly(answer, expected):
    assert parse_verdict(answer) == expected


# Judges


def test_verdicts_of_an_http_judge_are_counted(endpoint, measure, tmp_path):
    def reply(question: str) -> str:
        if "A cat" in question:
            return "Conclusion: True"
        return "No idea" if "letters" in question else "Conclusion: False\nProblematic Spans: ['N']"

    endpoint.reply = reply
    found = measure(f"judge={endpoint.url}/", "judge_model=m")
    assert values(found) == {
        "xsum, true": 0.5,
        "xsum, verdicts that cannot be read": 0,
        "qasper, true": 0,
        "qasper, verdicts that cannot be read": 1,
    }
    assert found["not_run"] == [
        "plain: 1 of 3 verdicts cannot be read and count as not true; the first is judged by "
        "m/qasper/0"
    ]
    path, headers, body = endpoint.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    written, judged = lines(tmp_path / "out")[:3], lines(tmp_path / "out")[3:]
    (first,) = (record for record in written if record["item"] == "xsum/0")
    question = {"role": "user", "content": judge_question(first)}
    assert body == {"model": "m", "temperature": 0, "max_tokens": 512, "messages": [question]}
    assert judged[1]["spans"] == ["N"]
    assert (tmp_path / "out/hallucination.png").exists()
    # No file of the results contains the key.
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize("trickling", ["headers", "body"])
def test_a_judge_that_answers_byte_by_byte_times_out(trickling, monkeypatch):
    """Check that the time limit applies to the whole response, not to the wait for each byte."""
    monkeypatch.setattr(judge_endpoint, "_PAUSES", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    body = json.dumps({"choices": [{"message": {"content": "late" + " " * 150}}]}).encode()
    headers = b"HTTP/1.0 200 OK\r\nX-Long: " + b"x" * 150 + b"\r\n\r\n"
    at_once, slowly = (b"", headers + body) if trickling == "headers" else (headers, body)

    class Trickle(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(at_once)
            # The client closes the connection after its time limit, and the next write fails.
            with suppress(OSError):
                for byte in slowly:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.02)

    with ThreadingTCPServer(("127.0.0.1", 0), Trickle) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        judge = open_judge(f"http://127.0.0.1:{server.server_address[1]}", "m", "NO_KEY", 16, 0.3)
        with pytest.raises(UserError, match=r"does not answer within 0\.3 seconds"):
            judge.ask("?")
        server.shutdown()


def test_texts_and_verdicts_are_kept_when_a_judge_fails(
    endpoint, measure, tmp_path, monkeypatch, caplog, capfd
):
    """Check that an interruption and failures of the judge do not change the final results."""
    caplog.set_level(logging.DEBUG)
    whole = values(measure(f"judge={endpoint.url}", "judge_model=m", out="whole"))
    endpoint.asked.clear()
    kept = Hallucination.follow_ups

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hallucination, "follow_ups", dies)
    with pytest.raises(KeyboardInterrupt):
        measure("judge=http://127.0.0.1:9/v1", "judge_model=m")
    monkeypatch.setattr(Hallucination, "follow_ups", kept)
    written = lines(tmp_path / "out")
    assert len(written) == 3
    # Fail if a text is generated again.
    monkeypatch.setattr(Model, "answers", dies)
    with pytest.raises(UserError, match=r"judge http://127\.0\.0\.1:9/v1/.* cannot be reached \("):
        measure("judge=http://127.0.0.1:9/v1", "judge_model=m")
    assert lines(tmp_path / "out") == written

    endpoint.reply = lambda q: "Conclusion: True" if len(endpoint.asked) == 1 else 500
    with pytest.raises(UserError, match="answers with HTTP status 500; all texts and verd"):
        measure(f"judge={endpoint.url}", "judge_model=m")
    assert len(endpoint.asked) == 1 + 3
    assert len(lines(tmp_path / "out")) == 4

    wait = threading.Event()
    endpoint.reply = lambda q: f"late {wait.wait(5)}"
    with pytest.raises(UserError, match=r"does not answer within 0\.05 seconds"):
        measure(f"judge={endpoint.url}", "judge_model=m", "judge_seconds=0.05")
    wait.set()
    endpoint.reply = lambda q: 401
    endpoint.asked.clear()
    with pytest.raises(UserError, match="status 401"):
        measure(f"judge={endpoint.url}", "judge_model=m")
    endpoint.reply = lambda q: 307
    with pytest.raises(UserError, match="status 307"):
        measure(f"judge={endpoint.url}", "judge_model=m")
    endpoint.reply = lambda q: b"<html>"
    with pytest.raises(UserError, match="answers with something that is not a chat completion"):
        measure(f"judge={endpoint.url}", "judge_model=m")
    # These three failures are not temporary, so no request is repeated.
    assert len(endpoint.asked) == 3
    endpoint.reply = lambda q: "Conclusion: True"
    assert values(measure(f"judge={endpoint.url}", "judge_model=m")) == whole
    # A different judge evaluates all texts again. The verdicts of the first judge are kept.
    endpoint.reply = lambda q: "Conclusion: False"
    other = values(measure(f"judge={endpoint.url}", "judge_model=other"))
    assert (other["xsum, true"], whole["xsum, true"]) == (0, 1)
    endpoint.asked.clear()
    assert values(measure(f"judge={endpoint.url}", "judge_model=m")) == whole
    assert not endpoint.asked
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


def test_a_model_folder_can_be_the_judge(folder, measure, monkeypatch, tmp_path):
    """Check that a model folder can be the judge, and that its chat template formats questions."""
    path = tmp_path / "judge"
    write_pretrained(path, "qwen3", max_position_embeddings=4096)
    found = measure(f"judge={path}", "judge_tokens=6")
    assert values(found)["xsum, verdicts that cannot be read"] == 1
    prompts = []

    def says(model: Model, request: Generation) -> list[int]:
        if model.target.path != path:
            return list(b" Some text.")
        prompts.append(model.target.tokenizer.decode(request.ids))
        return list(b"Conclusion: True")

    monkeypatch.setattr(Model, "answers", answering(says))
    assert values(measure(f"judge={path}", "judge_tokens=6", out="other"))["xsum, true"] == 1
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}!"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    open_judge.cache_clear()
    measure(f"judge={path}", "judge_tokens=7", out="chat")
    assert prompts[-1] == f"<user>{judge_question(lines(tmp_path / 'chat')[2])}!"
    with pytest.raises(UserError, match="judge judge has a context of 4,096 tokens, and a"):
        measure(f"judge={path}", "judge_tokens=4000", out="long")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["judge=nowhere"], "nowhere is not a model"),
        (["judge=http://host:secret/v1"], "must have the form https://host/path"),
        (["judge=http://host/v1"], "also give hallucination.judge_model"),
        (["judge=http://me:secret@host/v1", "judge_model=m"], "without a user and without a"),
        (["judge=http://host/v1?key=secret", "judge_model=m"], "without a user and without a"),
        (
            ["judge=http://h/v1", "judge_model=m", "judge_key=WRONG"],
            "variable WRONG is not printable",
        ),
        (["tasks=[xsun]"], "task 'xsun' is unknown; choose from xsum"),
    ],
)
def test_invalid_settings_are_errors_without_secrets(settings, said, measure, monkeypatch):
    monkeypatch.setenv("WRONG", "secret key\n")
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        measure(*settings)
    assert "secret" not in str(caught.value)
