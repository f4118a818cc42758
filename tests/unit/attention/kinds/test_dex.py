"""Tests of DEX attention: annealing of lambda, recipe section, missing heads file, costs, export.

In the selected heads, DEX subtracts lambda O W_D from the output O of a softmax head. The heads can
come from a file. The export folds W_D into the output projection W_O.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from diffmegatron.attention.kinds.dex import LAMBDA_LEARN, PROJECTION, Dex
from diffmegatron.attention.kinds.selected_heads import read_selected
from diffmegatron.cli import app
from diffmegatron.config.load import check_recipe, load_recipe
from diffmegatron.errors import UserError
from diffmegatron.hf.weight_mapping import from_hf, to_hf
from diffmegatron.model.accounting.flops import count_flops
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.plan import plan_recipe
from diffmegatron.plan.rehearse import small_recipe
from tests.paths import CONFIGS
from tests.unit.hf.test_weight_mapping import make_recipe, make_tokens, make_weights, paper_logits

SELECTED = [[0, 3], [], [1, 2, 5]]
DEX = {"kind": "dex", "num_heads": 6, "num_kv_heads": 2, "annealing_steps": 40}


class Layer:
    """Fake layer with the attributes that ``current_lambda`` uses."""

    def __init__(self, number: int, step: int, learned: float) -> None:
        self.layer_number, self.step, self._learned = number, step, learned

    def parameter(self, name: str) -> torch.Tensor:
        assert name == LAMBDA_LEARN
        return torch.tensor([self._learned])


def lambda_at(step: int, learned: float, number: int = 1, steps: int | None = 1000) -> float:
    kind = Dex(selected_heads=((0,),), annealing_steps=steps)
    value = kind.current_lambda(Layer(number, step, learned))
    assert (value.dtype, value.shape) == (torch.float32, ())
    return value.item()


# lambda(t)


@pytest.mark.parametrize("number", [1, 2, 28])
def test_the_annealed_part_peaks_at_a_quarter_of_lambda_init_half_way(number):
    initial = 0.8 - 0.6 * math.exp(-0.3 * (number - 1))
    course = [lambda_at(step, 0.0, number) for step in range(0, 1201, 50)]
    assert max(course) == course[10] == pytest.approx(initial / 4)
    assert course[0] == 0
    assert course[20:] == [0] * 5
    assert course[4] == pytest.approx(0.2 * 0.8 * initial)
    assert course[:21] == pytest.approx(course[20::-1])


def test_the_learned_part_comes_in_linearly_and_stays():
    for step, share in ((0, 0), (250, 0.25), (500, 0.5), (999, 0.999), (1000, 1), (5000, 1)):
        found = lambda_at(step, 0.3) - lambda_at(step, 0.0)
        assert found == pytest.approx(0.3 * share, abs=1e-7)
    assert lambda_at(1000, 0.3) == torch.tensor(0.3).item()


def test_lambda_is_the_learned_value_without_annealing():
    assert {lambda_at(step, -0.7, steps=None) for step in (0, 1, 10**9)} == {
        torch.tensor(-0.7).item()
    }


# The recipe section


@pytest.fixture
def heads_file(tmp_path: Path):
    """Return a function that writes a heads file for 3 layers of 6 heads and returns its path.

    In the text of the file, ``old`` is replaced by ``new``.
    """

    def write(old: str = "", new: str = "") -> str:
        text = (
            "model: {num_layers: 3, num_heads: 6, fingerprint: 0f1e2d}\n"
            f"method: entropy\nshare: 0.5\nheads: {SELECTED}\n"
        )
        assert old in text
        path = tmp_path / "heads.yaml"
        path.write_text(text.replace(old, new))
        return str(path)

    return write


def recipe_of(path: str):
    return make_recipe(**DEX, **read_selected(path, may_be_missing=False))


def test_selected_heads_are_read_from_a_file(heads_file):
    path = heads_file()
    attention = recipe_of(path).model.attention
    assert attention.kinds[0].selected_heads == tuple(map(tuple, SELECTED))
    assert attention.foundation.fingerprint == "0f1e2d"
    resolved = attention.model_dump(mode="json")
    assert resolved["selected_heads"] == SELECTED
    Path(path).unlink()
    assert make_recipe(**{"num_layers": 3} | {**DEX, **resolved}).model.attention == attention


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"annealing_steps": 0}, "annealing_steps"),
        # A resolved recipe has a list of heads, not the name of a file.
        ({"selected_heads": "heads.yaml"}, "selected_heads"),
        ({"selected_heads": [[], [], []]}, "selected_heads selects no head"),
        ({"selected_heads": [[0], [6], [1]]}, r"selected_heads of layer 2 are \[6\]; give numbers"),
        ({"selected_heads": [[0], [-1], [1]]}, r"selected_heads of layer 2 are \[-1\]"),
        ({"selected_heads": [[0], [1], [3, 3]]}, r"selected_heads of layer 3 are \[3, 3\]"),
        ({"selected_heads": [[0], [1]]}, "selected_heads has 2 layers and model.num_layers is 3"),
        ({"projection_init": {"kind": "normal"}}, "projection_init.scale is None with kind 'norm"),
        ({"projection_init": {"scale": 0.1}}, "projection_init.scale is 0.1 with kind 'zero'"),
    ],
)
def test_invalid_dex_settings_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        make_recipe(**DEX | {"selected_heads": SELECTED} | changes)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_heads: 6", "num_heads: 8", "selected on a model of 8 heads and num_heads is 6"),
        ("num_layers: 3", "num_layers: 4", "has heads of 3 layers, and .* is 4"),
        (f"heads: {SELECTED}", "heads: [[0], [1]]", "has heads of 2 layers, and .* is 3"),
        ("share: 0.5", "share: 2", "file of 'diffmegatron dex select': share is 2: input should"),
        ("share: 0.5", "", "file of 'diffmegatron dex select': key 'share' is missing"),
        ("model: {num_layers: 3, num_heads: 6, fingerprint: 0f1e2d}", "- 1", "heads.yaml"),
    ],
)
def test_an_unsuitable_or_missing_heads_file_is_refused(old, new, said, heads_file):
    with pytest.raises(ValueError, match=said):
        recipe_of(heads_file(old, new))
    with pytest.raises(ValueError, match=r"selected_heads names nowhere\.yaml, which does not"):
        recipe_of("nowhere.yaml")


# A heads file that does not exist yet

QUICKSTART = CONFIGS / "quickstart.yaml"


def extended(heads: object) -> str:
    """Return an override that selects DEX for the quickstart recipe, which has 4 layers.

    Args:
        heads: value of ``selected_heads``: the heads of each layer, or the path of a heads file.
    """
    return (
        f"model.attention={{kind: dex, num_heads: 8, annealing_steps: 9, selected_heads: {heads}}}"
    )


def test_a_plan_without_a_heads_file_counts_half_of_the_heads(tmp_path, capsys):
    missing = tmp_path / "heads.yaml"
    found, expected = (
        plan_recipe(load_recipe(QUICKSTART, [extended(heads)], allow_missing_files=True))
        for heads in (missing, [[1, 2, 4, 7]] * 4)
    )
    assert found == expected
    rehearsal = small_recipe(
        load_recipe(QUICKSTART, [extended(missing)], allow_missing_files=True), None, tmp_path
    )
    (small,) = rehearsal.recipe.model.attention.kinds
    assert small.selected_heads == (tuple(range(small.num_heads // 2)),)
    for more in ([], ["--json"], ["--search", "2"]):
        app(["plan", str(QUICKSTART), extended(missing), *more], standalone_mode=False)
        out, said = capsys.readouterr()
        assert f"{missing}, the file of model.attention.selected_heads, is not written" in said
        assert "4 of the 8 heads of every layer, a --share of 0.5" in said
        assert said.count("\n") == 1
        if more == ["--json"]:
            json.loads(out)
    app(["plan", str(QUICKSTART), extended([[0]] * 4)], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_training_and_export_without_the_heads_file_are_refused(tmp_path):
    missing = tmp_path / "heads.yaml"
    said = rf"write it with 'diffmegatron dex select MODEL --data PREFIX --out {missing}'"
    with pytest.raises(UserError, match=said):
        app(["train", str(QUICKSTART), extended(missing)], standalone_mode=False)
    with pytest.raises(UserError, match=said):
        load_recipe(QUICKSTART, [extended(missing)])
    model = load_recipe(QUICKSTART, [extended(missing)], allow_missing_files=True).model
    with pytest.raises(UserError, match=said):
        dict(to_hf(dex_weights(model), model, step=3))
    # If this recipe is saved and loaded, it is refused, because it still has no list of heads.
    with pytest.raises(UserError, match=r"selected_heads is \{'file': "):
        check_recipe(
            load_recipe(QUICKSTART, [extended(missing)], allow_missing_files=True).model_dump(),
            "saved",
        )


def test_a_broken_heads_file_is_refused_even_if_missing_files_are_allowed(tmp_path, heads_file):
    broken = heads_file("share: 0.5", "share: 2")
    with pytest.raises(UserError, match="file of 'diffmegatron dex select': share"):
        load_recipe(QUICKSTART, [extended(broken)], allow_missing_files=True)
    with pytest.raises(UserError, match="is a folder, not a file"):
        load_recipe(QUICKSTART, [extended(tmp_path)], allow_missing_files=True)


def test_the_baseline_needs_no_heads_file(tmp_path):
    overrides = [extended(tmp_path / "heads.yaml"), "model.baseline=true"]
    assert load_recipe(QUICKSTART, overrides).model.attention.kind == "softmax"


# Costs


def test_flops_count_the_selected_heads_alone():
    """Check that each of the 5 selected heads adds 2 forward FLOPs per token and weight of W_D."""
    dex = make_recipe(**DEX, selected_heads=SELECTED).model
    plain = make_recipe(**DEX, selected_heads=SELECTED, baseline=True).model
    d = dex.attention.head_dim
    more = count_flops(dex, 64).forward - count_flops(plain, 64).forward
    assert more == pytest.approx(2 * 5 * d**2)
    assert count_parameters(dex).total - count_parameters(plain).total == 3 * (d**2 + 1)


def test_a_rehearsal_selects_its_own_heads(tmp_path):
    recipe = make_recipe(**DEX, selected_heads=SELECTED)
    small = small_recipe(recipe, None, tmp_path).recipe.model
    (kind,) = small.attention.kinds
    assert len(kind.selected_heads) == small.num_layers
    assert 0 < len(kind.selected_heads[0]) < kind.num_heads


# Export and import: W_D is folded into W_O


def dex_weights(model, seed: int = 5) -> dict[str, torch.Tensor]:
    """Return random weights in float64, except lambda_learn, which is float32.

    W_D and lambda_learn have a standard normal distribution. In training both start near zero by
    default.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: weight.double() for name, weight in make_weights(model).items()}
    d = model.attention.head_dim
    for layer in range(model.num_layers):
        own = f"decoder.layers.{layer}.self_attention."
        weights[own + PROJECTION] = torch.randn(d, d, generator=generator).double()
        weights[own + LAMBDA_LEARN] = torch.randn(1, generator=generator)
    return weights


@pytest.mark.parametrize("step", [0, 15, 40, 41])
def test_folded_weights_equal_the_layer(step):
    """Check that the folded W_O times plain heads equals W_O times heads with DEX's term.

    DEX's term is subtracted from the output of each selected head.
    """
    model = make_recipe(**DEX, selected_heads=SELECTED).model
    weights, d = dex_weights(model), model.attention.head_dim
    before = {name: weight.clone() for name, weight in weights.items()}
    folded = dict(to_hf(weights, model, step))
    heads = torch.randn(6, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for layer, selected in enumerate(SELECTED):
        own = f"decoder.layers.{layer}.self_attention."
        a = min(1.0, step / 40)
        lambda_ = (1 - a) * step / 40 * (0.8 - 0.6 * math.exp(-0.3 * layer))
        lambda_ += a * weights[own + LAMBDA_LEARN].item()
        extended = heads.clone()
        for head in selected:
            extended[head] -= lambda_ * (heads[head] @ weights[own + PROJECTION])
        expected = weights[own + "linear_proj.weight"] @ extended.flatten()
        found = folded[f"model.layers.{layer}.self_attn.o_proj.weight"] @ heads.flatten()
        # lambda itself is computed in float32.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        is_changed = not torch.equal(
            folded[f"model.layers.{layer}.self_attn.o_proj.weight"],
            weights[own + "linear_proj.weight"],
        )
        assert is_changed == (layer != 1 and step > 0)
    assert all(torch.equal(weights[name], value) for name, value in before.items())


def test_importing_a_llama_sets_the_dex_term_to_zero():
    model = make_recipe(**DEX, selected_heads=SELECTED).model
    plain = make_weights(make_recipe(**DEX, selected_heads=SELECTED, baseline=True).model)
    theirs = dict(to_hf(plain, make_recipe(**DEX, selected_heads=SELECTED, baseline=True).model))
    ours = dict(from_hf(theirs, model))
    assert ours.keys() - plain.keys() == {
        f"decoder.layers.{layer}.self_attention.{name}"
        for layer in range(3)
        for name in (PROJECTION, LAMBDA_LEARN)
    }
    for name, weight in ours.items():
        assert torch.equal(weight, plain.get(name, torch.zeros_like(weight))), name
    again = dict(to_hf(ours, model, step=17))
    assert all(torch.equal(again[name].float(), weight) for name, weight in theirs.items())
    assert paper_logits(plain, model, make_tokens()).isfinite().all()
