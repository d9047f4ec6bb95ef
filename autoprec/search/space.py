"""Search spaces: TOML files that say which units are decisions, how they are grouped and what may be chosen."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autoprec.errors import UsageError, did_you_mean, in_one_line
from autoprec.policy import GradScalerSettings

__all__ = ["AskedDtype", "Choice", "Range", "Rule", "SearchSpace", "builtin_spaces", "load_space", "parse_space"]

Value = bool | int | float
Choice = Literal["fp32", "autocast", "half", "fp16", "bf16"]
"""A precision by name, or `half`: true half in the study's dtype."""
AskedDtype = Literal["auto", "bf16", "fp16", "both", "mixed"]
_HALVES = {"half", "fp16", "bf16"}
MAX_FILE_BYTES, MAX_DOTS = 2**18, 500
"""Of a file, and of a line: Python's TOML reader takes time by the square of the parts of a dotted key."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Range(_Strict):
    """What one number may be: a list of choices, or an interval (`log` for a logarithmic one)."""

    choices: list[Value] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        interval = self.low is not None and self.high is not None
        if (self.choices is not None) == interval or (self.low is None) != (self.high is None):
            raise ValueError("give either `choices` or both `low` and `high`")
        if self.choices is not None and len(set(self.choices)) != len(self.choices):
            raise ValueError("a value stands twice in `choices`")
        if self.choices is not None and not self.choices:
            raise ValueError("`choices` is empty")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError("`low` is not below `high`")
        if self.log and (self.low is None or self.low <= 0):
            raise ValueError("`log` needs `low` above 0")
        return self


class GradScalerRanges(_Strict):
    """Ranges of `torch.amp.GradScaler`; what is left out keeps torch's default."""

    init_scale: Range | None = None
    growth_factor: Range | None = None
    backoff_factor: Range | None = None
    growth_interval: Range | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what GradScaler would, before a trial meets it."""
        for name, values in self:
            for value in [] if values is None else values.choices or [values.low, values.high]:
                is_whole = name == "growth_interval" and isinstance(value, float) and value.is_integer()
                try:
                    GradScalerSettings.model_validate({name: int(value) if is_whole else value})
                except ValidationError as error:
                    raise ValueError(f"`{name}`: {str(value)[:40]}: {error.errors()[0]['msg'].lower()}") from None
        return self


class OptimizerRanges(_Strict):
    """Ranges of an Adam-like optimizer; what is left out keeps the task's setting."""

    eps: Range | None = None
    amsgrad: Range | None = None


class Rule(_Strict):
    """Restrict the units whose name matches a glob of `names` or whose class matches one of `types`.

    One choice pins the unit; none leaves the choices as they are. `start` is what practice runs such units in: the
    study tries that early, as a trial of its own. A rule that matches no unit is an error unless it is `optional`.
    """

    names: list[str] = Field(default_factory=list)
    types: list[str] = Field(default_factory=list)
    choices: list[Choice] = Field(default_factory=list)
    start: Choice | None = None
    reason: str = Field(min_length=1, max_length=500)
    optional: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.names and not self.types:
            raise ValueError("a rule needs `names` or `types`")
        if not self.choices and self.start is None:
            raise ValueError("a rule needs `choices` or `start`")
        if self.choices and self.start is not None and not _may_start(self.start, self.choices):
            raise ValueError(f"`start` is {self.start}, which is none of `choices`")
        return self

    def matches(self, name: str, type_name: str) -> bool:
        return matches_any(name, self.names) or matches_any(type_name, self.types)


def _may_start(start: Choice, choices: Sequence[Choice]) -> bool:
    """Whether `start` is a choice, in a study of some dtype at least."""
    if start in choices:
        return True
    return start in _HALVES and ("half" in choices or (start == "half" and not _HALVES.isdisjoint(choices)))


class SearchSpace(_Strict):
    """One search space as its file states it."""

    name: str = Field(min_length=1, max_length=100)
    description: str = Field(default="", max_length=500)
    granularity: Literal["leaf", "block", "stage", "type"] = "leaf"
    repeats: Literal["separate", "together"] = "together"
    choices: list[Choice] = Field(default=["fp32", "autocast", "half"])
    followers: list[str] = Field(default_factory=list)
    rules: list[Rule] = Field(default_factory=list)
    grad_scaler: GradScalerRanges = GradScalerRanges()
    optimizer: OptimizerRanges = OptimizerRanges()
    dtype: AskedDtype = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        missing = {"fp32", "autocast"} - set(self.choices)
        if missing:
            raise ValueError(f"`choices` lacks {', '.join(sorted(missing))}, which the baselines need")
        for rule in self.rules:
            if rule.start is not None and not _may_start(rule.start, self.choices):
                raise ValueError(f"a rule starts from {rule.start}, which is none of `choices`")
        return self

    @property
    def named_choices(self) -> frozenset[Choice]:
        """Every choice that the space and its rules name, and `start` where it is FP16 or BF16 by name."""
        ruled = (choice for rule in self.rules for choice in (*rule.choices, *((rule.start,) if rule.start else ())))
        return frozenset({*self.choices, *(c for c in ruled if c != "half")})


def matches_any(text: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, glob) for glob in globs)


def builtin_spaces() -> dict[str, Path]:
    """Return the search spaces that come with autoprec, by name."""
    package = Path(__file__).resolve().parents[1]
    folder = next((f for f in (package / "search_spaces", package.parent / "search_spaces") if f.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_space(source: str | Path) -> SearchSpace:
    """Read a search space: the name of a built-in one, or a TOML file.

    Raises:
        UsageError: no such name or file, not TOML, an unknown key, a value that is not allowed.
    """
    data, path = _read(source)
    return _build(data, where=path.name, files=(path.resolve(),))


def _read(source: str | Path) -> tuple[dict[str, Any], Path]:
    builtin = builtin_spaces()
    path = builtin.get(str(source), Path(source))
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise OSError(0, "no regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise UsageError(f"search space {path.name}: larger than {MAX_FILE_BYTES // 2**10} KiB, no space is")
        if any(line.count(b".") > MAX_DOTS for line in text.splitlines()):
            raise UsageError(f"search space {path.name}: a line with more than {MAX_DOTS} dots: nested too deep")
        return tomllib.loads(text.decode("utf-8-sig")), path
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(
            f"search space {str(source)!r}: {reason}; give a TOML file or one of {', '.join(builtin)}"
            + did_you_mean(str(source), builtin)
        ) from None
    except RecursionError:
        raise UsageError(f"search space {path.name}: nested too deep, no space is") from None
    except UsageError:
        raise
    except ValueError as error:  # a TOMLDecodeError, or a number of more digits than Python takes
        raise UsageError(f"search space {path.name}: not TOML: {error}") from None


def _inherit(data: Mapping[str, Any], *, where: str, files: tuple[Path, ...]) -> dict[str, Any]:
    """Lay `data` over the built-in space that it inherits from: tables key by key, rules after those of the parent.

    `files` are those that `data` comes from and is inherited by; a file of one's own may be called like a built-in one.
    """
    own = dict(data)
    parent = own.pop("inherits", None)
    if parent is None:
        return own
    builtin = builtin_spaces()
    if not isinstance(parent, str) or parent not in builtin:
        raise UsageError(
            f"search space {where}: inherits: {str(parent)[:80]!r} is not one of {', '.join(builtin)}"
            + did_you_mean(str(parent), builtin)
        )
    above, path = _read(parent)
    if path.resolve() in files:
        raise UsageError(f"search space {where}: inherits: from itself")
    inherited = _inherit(above, where=path.name, files=(*files, path.resolve()))
    for table in ("grad_scaler", "optimizer"):
        if isinstance(own.get(table, {}), dict):
            own[table] = {**inherited.get(table, {}), **own.get(table, {})}
    if isinstance(own.get("rules", []), list):
        own["rules"] = [*inherited.get("rules", []), *own.get("rules", [])]
    return {**inherited, **own}


def parse_space(data: Mapping[str, Any], *, where: str) -> SearchSpace:
    """Build a search space from parsed TOML; `where` names the file in errors."""
    return _build(data, where=where, files=())


def _build(data: Mapping[str, Any], *, where: str, files: tuple[Path, ...]) -> SearchSpace:
    try:
        return SearchSpace(**_inherit(data, where=where, files=files))
    except ValidationError as error:
        raise UsageError(_space_error(error, where=where)) from None
    except (RecursionError, OverflowError):
        raise UsageError(f"search space {where}: nested too deep, or a number too large; no space is") from None


def _space_error(error: ValidationError, *, where: str) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(in_one_line, first["loc"])) or "file"
    if first["type"] == "extra_forbidden":
        model = _model_at(first["loc"][:-1])
        allowed = [*model.model_fields, *(["inherits"] if model is SearchSpace else [])]
        name = str(first["loc"][-1])
        return f"search space {where}: {place}: unknown key; allowed: {', '.join(allowed)}{did_you_mean(name, allowed)}"
    message = first["msg"].removeprefix("Value error, ")
    found = "" if first["type"] in ("value_error", "missing") else f"; found {str(first.get('input'))[:80]!r}"
    if first["type"] == "literal_error" and "choices" in first["loc"]:
        found += did_you_mean(str(first.get("input")), get_args(Choice))
    return f"search space {where}: {place}: {message}{found}"


def _model_at(location: Iterable[int | str]) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {
        "rules": Rule,
        "grad_scaler": GradScalerRanges,
        "optimizer": OptimizerRanges,
    }
    model: type[BaseModel] = SearchSpace
    for part in location:
        if isinstance(part, str):
            model = models.get(part, Range)
    return model
