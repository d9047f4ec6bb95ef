"""Search spaces as files: what is read, what is refused, and which one a model gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.search.space import builtin_spaces, choose_space, load_space


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_three_spaces_come_with_autoprec() -> None:
    assert sorted(builtin_spaces()) == ["cnn", "default", "transformer"]


@pytest.mark.parametrize("name", ["cnn", "default", "transformer"])
def test_each_builtin_space_loads_under_its_own_name_with_the_defaults_in_its_ranges(name: str) -> None:
    space = load_space(name)
    assert space.name == name
    assert space.grad_scaler.init_scale is not None
    assert 65536.0 in (space.grad_scaler.init_scale.choices or [])
    assert 32768.0 in (space.grad_scaler.init_scale.choices or [])


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"Conv2d": 53, "BatchNorm2d": 53, "Linear": 1}, "cnn"),
        ({"Conv2d": 1, "MultiheadAttention": 12, "LayerNorm": 25, "Linear": 25}, "transformer"),
        ({"Embedding": 1, "LayerNorm": 4, "Linear": 9}, "transformer"),
        ({"Linear": 3, "ReLU": 2}, "default"),
    ],
    ids=["resnet", "vit", "decoder", "mlp"],
)
def test_the_space_is_chosen_by_the_structure_of_the_model(counts: dict[str, int], expected: str) -> None:
    assert choose_space(counts).name == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "x"\ngranularty = "leaf"', ["granularty", "unknown key", "nearest: granularity"]),
        ('name = "x"\n[grad_scaler]\ninit_scal = {choices=[1.0]}', ["init_scal", "nearest: init_scale"]),
        ('name = "x"\nchoices = ["fp32", "fp16"]', ["choices", "lacks autocast"]),
        ('name = "x"\nchoices = ["fp32", "autocast", "fp61"]', ["choices.2", "fp61", "nearest: fp16"]),
        ('name = "x"\n[optimizer]\neps = {low = 1e-6, high = 1e-8}', ["optimizer.eps", "not below"]),
        ('name = "x"\n[optimizer]\neps = {low = 1e-8}', ["optimizer.eps", "both `low` and `high`"]),
        ('name = "x"\n[[rules]]\nchoices = ["fp32"]\nreason = "r"', ["rules.0", "`names` or `types`"]),
        ("name = ", ["mine.toml", "not TOML"]),
    ],
    ids=["key", "nested key", "missing choice", "wrong choice", "range", "half a range", "rule", "syntax"],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_space(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="nearest: transformer"):
        load_space("transfomer")
