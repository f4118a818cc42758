"""A kind of attention and a hook in a user's own file, used with the commands."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from diffmegatron import own_code
from diffmegatron.attention.kinds import KINDS
from diffmegatron.attention.kinds.layer import Parameter
from diffmegatron.errors import UserError
from diffmegatron.training import hook
from diffmegatron.training.monitoring.metrics import read_metrics
from tests.conftest import TINY
from tests.paths import ROOT
from tests.robustness.bad_paths import CLUSTER, run

EXAMPLE = (ROOT / "examples/own_export.py").read_text()
GATED, *COSTS = (ROOT / "examples/own_kind.py").read_text().partition("\n\n@register_costs")
COSTS = "".join(COSTS)
KIND = "model.attention={kind: gained, num_heads: 4, num_kv_heads: 2}"


@pytest.fixture
def process():
    """Yield a function that removes imported user code from this process.

    After a call of the function, a command starts without user code, as in a new process.
    """
    kinds, modules = dict(KINDS), set(sys.modules)

    def forget() -> None:
        KINDS.clear()
        KINDS.update(kinds)
        hook.HOOKS.clear()
        for name in [each for each in sys.modules if each.startswith("my_attention")]:
            del sys.modules[name]
        # A command may have set this variable. Do not remove it with monkeypatch.delenv, because
        # monkeypatch would set the command's value again at the end of the test.
        os.environ.pop(own_code.IMPORTS, None)

    yield forget
    forget()
    assert {each for each in sys.modules if "my_attention" in each} <= modules


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_attention.py"
    path.write_text(EXAMPLE)
    return path


def command(*words: object) -> str:
    """Run a command, check that it succeeds, and return its output."""
    status, out, err = run([str(word) for word in words])
    assert status == 0, f"{status} {err}"
    return out


def refused(*words: object) -> str:
    status, _, err = run([str(word) for word in words])
    assert status == 2, f"{status} {err}"
    return err


def test_lambda_per_head_trains_plans_and_refuses_export(corpus, tmp_path, process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = TINY.format(run_dir="run", corpus=corpus).replace("steps: 20", "steps: 4")
    Path("tiny.yaml").write_text(text)
    kind = "model.attention={kind: head_gated, num_heads: 4, num_kv_heads: 2}"
    Path("my_attention.py").write_text(GATED)
    asked = ("--import", "my_attention.py")
    refusal = "model.attention.kind 'head_gated' cannot be exported: no export is registered"
    flops = []
    for content in (GATED, GATED + COSTS):
        Path("my_attention.py").write_text(content)
        process()
        plan = json.loads(command(*asked, "plan", "tiny.yaml", kind, "--json"))
        assert any(refusal in warning for warning in plan["warnings"])
        flops.append(plan["flops_per_token"]["forward"])
        assert plan["parameters"]["lambdas"] == 2 * 4
        assert plan["baseline_num_heads"] == 8
    # The costs of the page count each of the 8 query heads of width 8 twice.
    assert flops[1] - flops[0] == 2 * 2 * (64 / 2) * 2 * 8 * 8
    process()
    assert refusal in command(*asked, "train", "tiny.yaml", kind)
    rows = [row for row in read_metrics(Path("run")) if "attn/lambda_layer_01" in row]
    first, *_, last = (row["attn/lambda_layer_01"] for row in rows)
    assert first != last and first == pytest.approx(0.5, abs=1e-2)
    process()
    # The refusal needs none of the slow imports.
    monkeypatch.setattr("diffmegatron.api.importing_engines", None)
    assert refusal in refused(*asked, "export", "run", "hf")
    assert not Path("hf").exists()


@pytest.mark.parametrize(
    ("role", "shape", "sentence"),
    [
        ("gate", (1,), "'g' has the role 'gate'; give matrix, bias, norm or lambda"),
        ("lambda", (), r"'g' has no axis; give the shape \(1,\) to a scalar"),
    ],
)
def test_a_parameter_that_cannot_be_counted_or_sharded_is_refused(role, shape, sentence):
    with pytest.raises(UserError, match=sentence):
        Parameter("g", shape, 0.1, role)


def test_an_own_kind_works_in_every_command(own, corpus, tmp_path, process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = TINY.format(run_dir="run", corpus=corpus).replace("steps: 20", "steps: 3")
    Path("tiny.yaml").write_text(text)
    Path("cluster.yaml").write_text(CLUSTER)
    process()
    assert "model.attention.kind is 'gained'" in refused("plan", "tiny.yaml", KIND)
    asked = ("--import", own.name)
    process()
    assert "gained attention: 4 heads" in command(*asked, "plan", "tiny.yaml", KIND)
    process()
    command(*asked, "train", "tiny.yaml", KIND)
    assert [e["my/gain"] for e in read_metrics(Path("run")) if "my/gain" in e][-1] != 1
    checkpoint = "run/checkpoints/step_00000003"
    for folder in ("run", checkpoint):
        assert yaml.safe_load(Path(folder, "recipe.yaml").read_text())["imports"] == [str(own)]

    # Commands that read the run import its code only if --import names the code. Without --import
    # they end with an error.
    readers = [
        ("export", "run", "hf"),
        ("compare", "run", "--out", "compared"),
        ("checkpoint", "inspect", checkpoint),
        ("status", "run"),
        ("evaluate", "run", "--suite", "loss", "--data", "text.txt", "--out", "eval"),
    ]
    Path("text.txt").write_text("some words of a text. " * 20)
    for words in readers:
        process()
        assert f"give diffmegatron --import {own} before the command" in refused(*words)
        assert not any(name.startswith("my_attention") for name in sys.modules)
        process()
        command(*asked, *words)

    # The script of a job exports the names of the imports. Commands also import code that an
    # environment variable or a recipe names.
    process()
    script = command(*asked, "launch", "tiny.yaml", KIND, "run_dir=other", "--nodes", "2",
                     "--cluster", "cluster.yaml", "--dry-run")  # fmt: skip
    assert f"export {own_code.IMPORTS}={own}" in script
    process()
    monkeypatch.setenv(own_code.IMPORTS, str(own))
    assert "gained attention" in command("plan", "tiny.yaml", KIND)
    process()
    Path("tiny.yaml").write_text(f"{text}\nimports: [./my_attention.py]\n")
    assert "gained attention" in command("plan", "tiny.yaml", KIND)
    # This command resumes the run from its checkpoint, which needs the user's code. The code is
    # imported without --import, because the recipe on the command line names it in `imports`.
    process()
    command("train", "tiny.yaml", KIND, "training.steps=4")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import no_such_module\n", "at line 1: ModuleNotFoundError: No module named"),
        ("x = 1\nif:\n", "at line 2: SyntaxError"),
        ("\n\n1 / 0\n", "at line 3: ZeroDivisionError"),
        (GATED.replace("def forward(", "def attend("), "ValueError: class HeadGated lacks forward"),
        (GATED.replace("    title: Class", "    name: Class"), "class HeadGated lacks title"),
        (GATED.replace(' = "head_gated"', ""), "class HeadGated has no kind; give its field kind"),
        (EXAMPLE.replace('"gained"', '"diff_v1"'), "ValueError: attention kind 'diff_v1' is"),
    ],
)
def test_an_error_in_imported_code_names_its_line(content, said, tmp_path, process):
    process()
    path = tmp_path / "my_attention_bad.py"
    path.write_text(content)
    assert said in refused("--import", path, "doctor")
    assert not any(name.startswith("my_attention") for name in sys.modules)


def test_importing_a_path_that_is_not_python_is_refused(tmp_path, process):
    process()
    os.mkfifo(tmp_path / "fifo.py")
    assert "is a FIFO" in refused("--import", tmp_path / "fifo.py", "doctor")
    assert "cannot read" in refused("--import", "no_such.py", "doctor")
    assert "No module named 'no_such'" in refused("--import", "no_such", "doctor")
    (tmp_path / "text").write_text("")
    assert "is not a Python file" in refused("--import", tmp_path / "text", "doctor")


def test_files_with_the_same_name_are_separate_modules(tmp_path, process):
    process()
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_attention.py").write_text(f"NAME = {name!r}\n")
        own_code.import_code(str(tmp_path / name / "my_attention.py"))
    found = [sys.modules[each].NAME for each in sys.modules if each.startswith("my_attention_")]
    assert sorted(found) == ["a", "b"]


def test_an_export_without_a_rule_for_a_parameter_is_refused(tiny_recipe, process):
    from diffmegatron.attention.kinds import LayerKinds
    from diffmegatron.attention.kinds.diff_v1 import DiffV1
    from diffmegatron.attention.kinds.layer import Constant
    from diffmegatron.hf.kinds import export_problem, register_export
    from diffmegatron.hf.kinds.diff_v1 import DiffV1Export
    from diffmegatron.hf.kinds.export import EXPORTS
    from diffmegatron.hf.weight_mapping import table

    class Shifted(DiffV1):
        kind: str = "shifted"

        def parameters(self, hidden_size):
            return (
                *super().parameters(hidden_size),
                Parameter("shift", (4,), Constant(0.0), "norm"),
            )

    model = tiny_recipe().model
    shifted = Shifted(**model.attention.kinds[0].model_dump(exclude={"kind"}))
    model = model.model_copy(update={"attention": LayerKinds(kinds=(shifted,))})
    # The export of the parent class is not inherited.
    with pytest.raises(UserError, match=r"'shifted' cannot be exported: no export .* Shifted"):
        table(model)
    register_export(Shifted)(DiffV1Export)
    try:
        with pytest.raises(UserError, match=r"has no rule for its parameter shift"):
            table(model)
        assert "shift" in export_problem(model.attention, model.hidden_size, model.num_layers)
    finally:
        del EXPORTS[Shifted]


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("gained", 5e-2), ("diff_v2", 1e-4), ("diff_v1", 5e-2)]
)
def test_only_folded_weights_have_the_tolerance_of_bf16(kind, tolerance, tiny_recipe, process, own):
    import torch

    from diffmegatron.hf.export_checkpoint import TOLERANCE, _rounded_differently

    process()
    own_code.import_code(str(own))
    section = f"model.attention={{kind: {kind}, num_heads: 4, num_kv_heads: 2}}"
    recipe = tiny_recipe(section, "training.precision=bf16")
    assert TOLERANCE[_rounded_differently(recipe, torch.bfloat16, None, 0)] == tolerance
