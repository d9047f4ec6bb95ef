"""Search spaces as files: what is read, what is refused, and which one a model gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.search.space import Range, Rule, builtin_spaces, load_space, parse_space


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


SPACES = ["bert", "cnn", "default", "gpt", "mlp", "resnet", "rnn", "speech", "transformer", "unet", "vit"]


def test_a_space_for_each_family_comes_with_autoprec() -> None:
    assert sorted(builtin_spaces()) == SPACES


@pytest.mark.parametrize("name", SPACES)
def test_each_builtin_space_loads_under_its_own_name_with_the_defaults_in_its_ranges(name: str) -> None:
    space = load_space(name)
    assert space.name == name
    assert space.description
    assert space.grad_scaler.init_scale is not None
    assert {32768.0, 65536.0} <= set(space.grad_scaler.init_scale.choices or [])
    assert set(space.choices) == {"fp32", "autocast", "half"}
    assert all(rule.optional for rule in space.rules)


def test_what_a_space_inherits_is_laid_under_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        name = "mine"
        inherits = "vit"
        repeats = "separate"
        [[rules]]
        names = ["conv_proj"]
        choices = ["fp32"]
        reason = "mine"
        [optimizer]
        eps = { choices = [1e-8, 1e-5] }
        """,
    )
    space, parent = load_space(path), load_space("vit")
    assert (space.name, space.repeats, space.followers) == ("mine", "separate", parent.followers)
    assert space.rules == [*parent.rules, Rule(names=["conv_proj"], choices=["fp32"], reason="mine")]
    assert space.optimizer.eps == Range(choices=[1e-8, 1e-5])
    assert space.optimizer.amsgrad == parent.optimizer.amsgrad
    assert space.grad_scaler == parent.grad_scaler


def test_a_file_called_like_a_builtin_space_may_inherit_from_it(tmp_path: Path) -> None:
    path = tmp_path / "vit.toml"
    path.write_text('name = "mine"\ninherits = "vit"\nrepeats = "separate"')
    space, parent = load_space(path), load_space("vit")
    assert space == parent.model_copy(update={"name": "mine", "repeats": "separate"})
    data = {"name": "mine", "inherits": "vit", "repeats": "separate"}
    assert parse_space(data, where="vit.toml") == space


@pytest.mark.parametrize("parents", [("a",), ("b", "a")], ids=["itself", "a round"])
def test_a_space_that_inherits_from_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parents: tuple[str, ...]
) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("a", "b")}
    for name, parent in zip(files, parents, strict=False):
        files[name].write_text(f'name = "{name}"\ninherits = "{parent}"')
    monkeypatch.setattr("autoprec.search.space.builtin_spaces", lambda: files)
    for source in ("a", files["a"]):
        with pytest.raises(UsageError, match="inherits: from itself"):
            load_space(source)


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
        ('name = "x"\ninherits = "vitt"', ["inherits", "vitt", "nearest: vit"]),
        ('name = "x"\ninherit = "vit"', ["inherit", "nearest: inherits"]),
        ('name = "x"\n[[rules]]\nnames = ["a"]\nreason = "r"', ["rules.0", "`choices` or `start`"]),
        (
            'name = "x"\n[[rules]]\nnames = ["a"]\nchoices = ["fp32"]\nstart = "fp16"\nreason = "r"',
            ["rules.0", "none of `choices`"],
        ),
        (
            'name = "x"\nchoices = ["fp32", "autocast", "fp16"]\n'
            '[[rules]]\nnames = ["a"]\nstart = "bf16"\nreason = "r"',
            ["starts from bf16"],
        ),
        ("name = ", ["mine.toml", "not TOML"]),
    ],
    ids=[
        "key",
        "nested key",
        "missing choice",
        "wrong choice",
        "range",
        "half a range",
        "rule",
        "parent",
        "inherit",
        "empty rule",
        "start",
        "start outside",
        "syntax",
    ],
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
