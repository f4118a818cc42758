"""Command lines of all benchmarks.

They are apart from the modules that measure, because those import torch, which takes seconds.
``--help`` and a mistake on the command line end without that import.
"""

import argparse
import ast
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from tools.paths import RESULTS, ROOT


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after a benchmark's name; --help prints the docstring of its module."""
    source = Path(__file__).with_name(f"{name}.py").read_text()
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.benchmarks {name}",
        description=ast.get_docstring(ast.parse(source)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _ADDED[name](parser)
    return parser.parse_args(argv)


def count(text: str) -> int:
    """Parse a positive whole number of the command line, such as 8 or 1e9."""
    number = float(text)
    if not 1 <= number < math.inf or number != int(number):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number such as 8 or 1e9")
    return int(number)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if it can be used")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])


def _attention(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536]
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens per batch; default: one sequence, on a GPU the greatest length",
    )
    parser.add_argument("--heads", type=int, default=12, help="diff heads h; the baseline has 2h")
    parser.add_argument("--kv-heads", type=int, help="kv heads of diff attention; default: h")
    parser.add_argument("--head-dim", type=int, default=128, help="d")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=DIFFERENTIAL,
        help="backends to time; default: all that can run, on a GPU except plain PyTorch",
    )
    parser.add_argument("--name", help="name of the result files; default: device, dtype and d")


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scratch",
        type=Path,
        required=True,
        help="directory to create on the disk to measure; removed at the end",
    )
    parser.add_argument("--layers", type=int, default=8, help="layers of the model; default 8")
    parser.add_argument("--hidden", type=int, default=768, help="hidden size; default 768")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind; default 5")
    parser.add_argument("--out", type=Path, help="file of the report; default: print only")


def _chunks(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    parser.add_argument("--chunk", type=int, default=4096, help="number of queries and of keys")
    parser.add_argument("--heads", type=int, default=12, help="diff heads h; the baseline has 2h")
    parser.add_argument("--head-dim", type=int, default=128, help="d")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--name", help="name of the result file; default: device, dtype and d")


def _compare_dex(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXTS", help="input of prepare")
    parser.add_argument("--part", choices=("arms", "starts", "throughput", "all"), default="all")
    parser.add_argument("--steps", type=int, default=100, help="of 1,024 tokens, in every arm")
    parser.add_argument("--start-steps", type=int, default=24, help="of 512 tokens, in every start")
    parser.add_argument("--timed-steps", type=int, default=5, help="steps of every timed run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every start and timed arm")
    parser.add_argument("--work", type=Path, default=Path("runs/compare_dex"), help="the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_dex/report.json"))


def _coordinates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", default="diff_v1", help="kind of attention")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "coordinates.json")


def _cpu_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--seconds", type=float, default=15.0, help="CPU time per length")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_step.json")


def _data(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")

    def add_part(name: str, about: str) -> argparse.ArgumentParser:
        part: argparse.ArgumentParser = parts.add_parser(name, help=about, description=about)
        part.add_argument("--scratch", type=Path, required=True, help="folder for the corpora")
        part.add_argument(
            "--name", default=f"data_{name}", help="name of the result file; default %(default)s"
        )
        return part

    part = add_part(
        "tokenise",
        "Measure the MB/s of prepare by text size and workers, and of a bare loop over tiktoken.",
    )
    part.add_argument(
        "--megabytes",
        type=count,
        nargs="+",
        default=[10, 100, 1000],
        help="sizes of the texts, all written to --scratch; default 10 100 1000",
    )
    part.add_argument(
        "--tokenizer", default="cl100k_base", help="one of tiktoken's: cl100k_base, bytes or a file"
    )
    part.add_argument("--repeats", type=count, default=5, help="repetitions; default 5")
    part = add_part(
        "parts",
        "Measure the MB/s of processes that prepare one part of a text each, and the merge's time.",
    )
    part.add_argument(
        "--megabytes", type=count, default=300, help="total size of the text; default %(default)s"
    )
    part.add_argument(
        "--processes", type=count, nargs="+", default=[1, 2], help="processes at once; default 1 2"
    )
    part.add_argument(
        "--tokenizer", default="cl100k_base", help="tokenizer of prepare; default %(default)s"
    )
    part.add_argument("--repeats", type=count, default=3, help="repetitions (median); default 3")
    part = add_part(
        "loader",
        "Measure tokens/s and start-up time of this loader and of Megatron's, one process each.",
    )
    part.add_argument(
        "--tokens", type=count, default=150_000_000, help="tokens of the corpora, 4 bytes each"
    )
    part.add_argument(
        "--seq-lengths", type=count, nargs="+", default=[4096, 65536], help="default 4096 65536"
    )
    part.add_argument("--repeats", type=count, default=3, help="repetitions (median); default 3")
    part = add_part(
        "startup",
        "Measure the seconds to the first sample, with a new and an existing index, by corpus "
        "size. The default goes up to a trillion tokens, which take 9 GB of --scratch, 12 GiB of "
        "memory and minutes.",
    )
    part.add_argument(
        "--tokens",
        type=count,
        nargs="+",
        default=[10**9, 10**10, 10**11, 10**12],
        help="tokens of the corpora, in documents of 4000; default 1e9 1e10 1e11 1e12",
    )
    part.add_argument("--repeats", type=count, default=5, help="repetitions (median); default 5")
    part = add_part(
        "upsampling",
        "Measure the share of each source in the sampled tokens, for each mode of up-sampling.",
    )
    part.add_argument(
        "--tokens", type=count, default=10**9, help="tokens to draw, from sources a tenth as large"
    )


def _evaluation(parser: argparse.ArgumentParser) -> None:
    suites = ["lm-eval", "loss", "math", "needle", "many-shot"]
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--haystack", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=suites, default=suites)
    parser.add_argument("--items", type=int, default=4, help="of each part")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[1, 4096])
    parser.add_argument("--name", default="evaluation_batches")


def _gpu_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs/gpu_report",
        help="folder of the report; an earlier report there is replaced",
    )
    parser.add_argument(
        "--seconds",
        type=count,
        help="deadline of all steps (default 540, with --rehearse 5400); each has its share",
    )
    parser.add_argument("--rehearse", action="store_true", help="use tiny sizes, on any machine")


def _kernel_resources(parser: argparse.ArgumentParser) -> None:
    kernels = ["forward", "dkdv", "dkdv_one_pass", "dq"]
    capabilities = [80, 86, 87, 89, 90, 120, 121]
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    parser.add_argument(
        "--capability",
        type=int,
        choices=capabilities,
        default=90,
        help="compute capability to compile for; default 90 (Hopper)",
    )
    parser.add_argument(
        "--head-dim", type=int, choices=[64, 80, 96, 112, 128], default=128, help="d"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128], help="M to try")
    parser.add_argument("--keys", type=int, nargs="+", default=[32, 64, 128], help="N to try")
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--licm",
        type=int,
        nargs="+",
        choices=[0, 1],
        default=[0, 1],
        help="loop-invariant code motion to try: without (0), with (1)",
    )
    parser.add_argument("--name", help="name of the result file; default: the chip and d")


def _layer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default=str(ROOT / "configs/diff_3b_1t.yaml"))
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 4], help="the two depths")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="use a narrower model, for a CPU")
    parser.add_argument(
        "--attention",
        action="append",
        metavar="KIND[,KEY=VALUE...]",
        help="kind of attention to measure, with keys of its section, such as "
        "grouped,signal_per_noise=3; may be repeated; default: the recipe's",
    )
    parser.add_argument("--name", default="layer", help="name of the result files")
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe, KEY=VALUE")


def _layer_operations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default=str(ROOT / "configs/diff_3b_1t.yaml"))
    parser.add_argument(
        "--attention", action="append", help="kind to count beside the Transformer; default: all"
    )
    parser.add_argument("--name", default="layer_operations", help="name of the result files")
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe, KEY=VALUE")


def _lm_eval_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=200, help="number of questions")


def _startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")


def _study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, metavar="FILE", help="YAML file of the study")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--arms", type=lambda text: text.split(","), help="arms to run: A,B")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--repeat", metavar="RUN", help="train RUN again and compare it")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"), help="folder of runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "studies", help="folder of results")


def _study_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="files or folders")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens of the BPE")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the pieces")


def _study_recall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    parser.add_argument("--pairs", type=int, nargs="+", default=[2, 4, 8], help="values of D")
    parser.add_argument("--keys", type=int, default=32, help="number of keys, and of values")
    parser.add_argument("--documents", type=int, default=150_000, help="training documents")
    parser.add_argument("--held-out", type=int, default=512, help="documents held out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")


def _study_text(parser: argparse.ArgumentParser) -> None:
    sources = ["wikipedia", "essays", "shakespeare", "dictionary"]
    parser.add_argument("packages", type=Path, metavar="PACKAGES", help="folder of the downloads")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the JSONL files")
    parser.add_argument("--only", choices=sources, help="write this source alone")


# For each benchmark, the function that adds its arguments.
_ADDED: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "attention": _attention,
    "checkpoint": _checkpoint,
    "chunks": _chunks,
    "compare_dex": _compare_dex,
    "coordinates": _coordinates,
    "cpu_step": _cpu_step,
    "data": _data,
    "evaluation": _evaluation,
    "gpu_report": _gpu_report,
    "kernel_resources": _kernel_resources,
    "layer": _layer,
    "layer_operations": _layer_operations,
    "lm_eval_engine": _lm_eval_engine,
    "startup": _startup,
    "study": _study,
    "study_corpus": _study_corpus,
    "study_recall": _study_recall,
    "study_text": _study_text,
}
