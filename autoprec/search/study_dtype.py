"""The study's dtype: what `autocast` and `half` mean in a study, by what was asked, the search space and the target."""

from __future__ import annotations

from typing import Any, Literal, get_args

from autoprec.errors import UsageError, did_you_mean
from autoprec.policy import LowPrecision
from autoprec.search.space import AskedDtype, Choice, SearchSpace

__all__ = ["DTYPES", "StudyDtype", "as_dtype", "choose_dtype", "halves", "resolve_space"]

StudyDtype = Literal["bf16", "fp16", "both", "mixed"]
"""`both`: each policy is of one of the two, and the study samples which. `mixed`: BF16 with FP16 modules."""
DTYPES: tuple[AskedDtype, ...] = get_args(AskedDtype)


def as_dtype(name: str) -> AskedDtype:
    """Check a dtype's name.

    Raises:
        UsageError: no such one.
    """
    found = next((known for known in DTYPES if known == name), None)
    if found is None:
        raise UsageError(f"dtype {name!r}; allowed: {', '.join(DTYPES)}{did_you_mean(name, DTYPES)}")
    return found


def choose_dtype(asked: AskedDtype, space: SearchSpace, *, native_bf16: bool, target: str) -> StudyDtype:
    """Return the study's dtype; what is asked wins over the space, and the space over the target.

    A space that names FP16 or BF16 itself is of that dtype, one that names both is mixed. Any other is BF16 where the
    target has BF16 units, else FP16.

    Raises:
        UsageError: BF16 is asked for, or named by the space, and the target has no BF16 units.
    """
    wanted = asked if asked != "auto" else space.dtype
    if wanted == "auto":
        named = space.named_choices
        wanted = "bf16" if native_bf16 else "fp16"
        if {"fp16", "bf16"} <= named:
            wanted = "mixed"
        elif named & {"fp16", "bf16"}:
            wanted = "bf16" if "bf16" in named else "fp16"
    if wanted != "fp16" and not native_bf16:
        source = f"search space {space.name}: it" if asked == "auto" else f"dtype {wanted!r}: {target}"
        ends = f"asks for BF16, and {target} has no BF16 units" if asked == "auto" else "has no BF16 units"
        raise UsageError(f"{source} {ends}; allowed there: fp16")
    return wanted


def halves(dtype: StudyDtype) -> tuple[Choice, ...]:
    """Return the choices that `half` stands for in a study of this dtype, the one that goes with `autocast` first."""
    known: dict[StudyDtype, tuple[Choice, ...]] = {"both": ("half",), "mixed": ("bf16", "fp16")}
    return known.get(dtype) or (("bf16",) if dtype == "bf16" else ("fp16",))


def resolve_space(space: SearchSpace, dtype: StudyDtype) -> SearchSpace:
    """Return the space with `half` written as the study's dtype has it.

    Raises:
        UsageError: the space names a half that a study of this dtype does not have.
    """
    wanted = halves(dtype)
    foreign = sorted((space.named_choices & set(get_args(LowPrecision))) - set(wanted))
    if foreign:
        raise UsageError(
            f"search space {space.name}: names {foreign[0]}, which a study in {dtype} does not have; say half there,"
            " or search with --dtype mixed"
        )

    def written(choices: list[Choice]) -> list[Choice]:
        return list(dict.fromkeys(c for choice in choices for c in (wanted if choice == "half" else (choice,))))

    rules = []
    for rule in space.rules:
        start: dict[str, Any] = {"start": wanted[0]} if rule.start == "half" else {}
        rules.append(rule.model_copy(update={"choices": written(rule.choices), **start}))
    return space.model_copy(update={"choices": written(space.choices), "rules": rules})
