"""A precision policy: a frozen value with a JSON form that is data and runs nothing. Imports no torch.

Rules of precedence, for one module (names as `model.named_modules()` gives them):

1. An exact name counts for that module and everything below it; the nearest one wins.
   `{"layer4": "fp32", "layer4.0.conv1": "fp16"}`: `layer4.0.conv1` is fp16, the rest of `layer4` fp32.
2. Where no exact name encloses the module, a glob that matches it or a module above it (the nearest first). Globs match
   the full name, `*` also crosses dots; of several globs the one with the most literal characters wins, then the later.
   `{"layer4.*": "fp32"}`: everything below `layer4`; `layer40` is not touched.
3. The default. `{}`: every module computes in `default`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autoprec.errors import PolicyError, did_you_mean

__all__ = [
    "SCHEMA_VERSION",
    "PRECISIONS",
    "Precision",
    "LowPrecision",
    "Kind",
    "Number",
    "GradScalerSettings",
    "OptimizerSettings",
    "ModuleInfo",
    "ModelInfo",
    "ArmEvidence",
    "UnitEvidence",
    "VerificationEvidence",
    "Evidence",
    "Provenance",
    "Recommendation",
    "Policy",
    "load_policy",
    "write_atomically",
    "is_glob",
    "resolve_precisions",
]

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 8 * 2**20
MAX_DEPTH = 32

Precision = Literal["fp32", "autocast", "fp16", "bf16"]
LowPrecision = Literal["fp16", "bf16"]
Kind = Literal["measured", "emulated", "computed", "predicted"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

ShortText = Field(max_length=2_000)


class FrozenDict(dict[str, Any]):
    """A dict that keeps its order, pickles and copies, and refuses to change."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a policy is a frozen value; make a new one with policy.replace(...)")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = __ior__ = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, protected_namespaces=())

    @field_validator("*", mode="after")
    @classmethod
    def _freeze(cls, value: Any) -> Any:
        return FrozenDict(value) if type(value) is dict else value


class Number(_Frozen):
    """One number and where it comes from. `low` and `high` bound a confidence interval where there is one."""

    value: float
    kind: Kind
    low: float | None = None
    high: float | None = None


class GradScalerSettings(_Frozen):
    """The four numbers of `torch.amp.GradScaler`, with torch's own defaults."""

    init_scale: float = Field(default=65536.0, gt=0)
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=2000, ge=1)


class OptimizerSettings(_Frozen):
    """Optimizer settings that go with a precision; None leaves the optimizer's own default."""

    name: str | None = Field(default=None, max_length=200)
    eps: float | None = Field(default=None, gt=0)
    amsgrad: bool | None = None


class ModuleInfo(_Frozen):
    """What a policy remembers of one module: its class name and the shapes of its own parameters."""

    type: str = Field(max_length=200)
    parameters: dict[str, list[int]] = Field(default_factory=dict)


class ModelInfo(_Frozen):
    """The model that a policy was found on. `fingerprint` covers names and types, not shapes."""

    name: str = Field(max_length=500)
    fingerprint: str = Field(max_length=128)
    modules: dict[str, ModuleInfo] = Field(default_factory=dict)


class ArmEvidence(_Frozen):
    """The numbers of one arm (a baseline or the policy); None where nothing was obtained."""

    peak_memory_bytes: Number | None = None
    throughput_samples_per_second: Number | None = None
    accuracy: Number | None = None
    eval_loss: Number | None = None
    note: str = Field(default="", max_length=2_000)


class UnitEvidence(_Frozen):
    """Why one unit has its precision; the figures are there where a profile gave them."""

    precision: Precision
    reason: str = Field(default="", max_length=2_000)
    headroom_octaves: float | None = None
    flushed_share: float | None = None
    error_score: float | None = None
    saved_bytes: Number | None = None
    saved_seconds: Number | None = None


class VerificationEvidence(_Frozen):
    """What the proof did: paired runs on unused seeds against FP32. Margins are in units of the metric."""

    num_seeds: int = Field(ge=0)
    num_steps: int = Field(ge=0)
    margin: float
    provable_margin: float | None = None
    verdicts: dict[str, str] = Field(default_factory=dict)


class Evidence(_Frozen):
    arms: dict[str, ArmEvidence] = Field(default_factory=dict)
    units: dict[str, UnitEvidence] = Field(default_factory=dict)
    verification: VerificationEvidence | None = None


class Provenance(_Frozen):
    """Where a policy comes from. Holds no path, host, user, URL or password."""

    created: str | None = Field(default=None, max_length=64)
    versions: dict[str, str] = Field(default_factory=dict)
    device_type: str | None = Field(default=None, max_length=64)
    device_name: str | None = Field(default=None, max_length=200)
    device_capability: str | None = Field(default=None, max_length=32)
    target_gpu: str | None = Field(default=None, max_length=64)
    emulated: bool | None = None
    task: str | None = Field(default=None, max_length=500)
    study_name: str | None = Field(default=None, max_length=500)
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)


class Recommendation(_Frozen):
    choice: Literal["policy", "autocast", "fp32", "inconclusive"]
    sentence: str = Field(max_length=2_000)
    provisional: bool = False
    prefer: Literal["balanced", "fastest", "smallest"] = "balanced"


class Policy(_Frozen):
    """A whole policy. Only `default`, `modules` and `dtype` are what a person would write.

    `Policy(default="autocast", modules={"layer4.*": "fp32"}, dtype="fp16")`

    `dtype` is the low precision of `autocast`. `grad_scaler` None means torch's defaults where
    a scaler is needed.
    """

    schema_version: int = SCHEMA_VERSION
    default: Precision = "autocast"
    dtype: LowPrecision = "fp16"
    modules: dict[str, Precision] = Field(default_factory=dict)
    grad_scaler: GradScalerSettings | None = None
    optimizer: OptimizerSettings | None = None
    model: ModelInfo | None = None
    recommendation: Recommendation | None = None
    evidence: Evidence | None = None
    provenance: Provenance | None = None

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _policy_error(error, where="policy") from None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.schema_version != SCHEMA_VERSION:
            newer = self.schema_version > SCHEMA_VERSION
            raise ValueError(
                f"schema_version is {self.schema_version}; this autoprec reads {SCHEMA_VERSION}"
                + (". The file was written by a newer autoprec: upgrade autoprec to read it" if newer else "")
            )
        return self

    @field_validator("modules", mode="after")
    @classmethod
    def _check_names(cls, modules: dict[str, Precision]) -> dict[str, Precision]:
        for name in modules:
            if not name or len(name) > 500 or any(ord(character) < 32 for character in name):
                raise ValueError(f"{name[:60]!r} is not a module name or glob (1 to 500 printable characters)")
        return FrozenDict(modules)

    @property
    def precisions(self) -> frozenset[Precision]:
        """Every precision that the policy names, the default included."""
        return frozenset({self.default, *self.modules.values()})

    @property
    def low_precisions(self) -> frozenset[LowPrecision]:
        """The low formats in use, with `autocast` counted as the policy's dtype."""
        named = {self.dtype if p == "autocast" else p for p in self.precisions}
        return frozenset(p for p in get_args(LowPrecision) if p in named)

    @property
    def needs_grad_scaler(self) -> bool:
        """A grad scaler exists only where FP16 is."""
        return "fp16" in self.low_precisions

    def replace(self, **changes: Any) -> Policy:
        """Return a new policy with some fields changed, checked like any other."""
        return Policy(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    def to_json(self) -> str:
        """Return the JSON text; keys come in the order of the fields, what is empty is left out."""
        data = _without_empty(self.model_dump(mode="json"))
        return json.dumps({"schema_version": self.schema_version, **data}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "policy") -> Policy:
        """Parse a policy; never imports or runs anything.

        Raises:
            PolicyError: not strict JSON, too large or too deep, an unknown key, a value that is not allowed.
        """
        data = _strict_json(text, where=where)
        if not isinstance(data, dict):
            raise PolicyError(f"{where}: found {type(data).__name__}, a policy is a JSON object")
        try:
            return cls(**data)
        except PolicyError as error:
            raise PolicyError(where + str(error).removeprefix("policy")) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy whole or not at all."""
        write_atomically(path, self.to_json())


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy file. Reading runs nothing.

    Raises:
        PolicyError: no such file, or not a policy (where, what was found, what is allowed, the nearest name).
    """
    name = Path(path).name
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise PolicyError(f"{name}: cannot be read ({reason})") from error
    return Policy.from_json(data, where=name)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path` through a temporary file beside it: the old or the new content, never a part."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644 if not target.exists() else target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_glob(rule: str) -> bool:
    return any(character in rule for character in "*?[")


def resolve_precisions(
    policy: Policy, parents: Mapping[str, str | None]
) -> tuple[dict[str, Precision], dict[str, str | None]]:
    """Resolve the policy for each module name by the precedence at the top of this file. Pure.

    Args:
        policy: the policy.
        parents: each module name -> the name of the module it lives in, None for the root. Parents come first.

    Returns:
        The precision of each name, and the rule that decided it (None for the default).
    """
    exact: dict[str, str | None] = {}
    glob: dict[str, str | None] = {}
    globs = _ordered_globs(tuple(rule for rule in policy.modules if is_glob(rule)))
    for name, parent in parents.items():
        inherited_exact = None if parent is None else exact[parent]
        inherited_glob = None if parent is None else glob[parent]
        exact[name] = name if name in policy.modules and not is_glob(name) else inherited_exact
        glob[name] = next((rule for rule, pattern in globs if pattern.match(name)), inherited_glob)
    rules = {name: exact[name] or glob[name] for name in parents}
    return {name: policy.default if rule is None else policy.modules[rule] for name, rule in rules.items()}, rules


@lru_cache(maxsize=64)
def _ordered_globs(rules: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    def literals(item: tuple[int, str]) -> tuple[int, int]:
        index, rule = item
        return (sum(character not in "*?[]" for character in rule), index)

    ordered = [rule for _, rule in sorted(enumerate(rules), key=literals, reverse=True)]
    return tuple((rule, re.compile(fnmatch.translate(rule))) for rule in ordered)


def content_hash(text: str) -> str:
    """Return the first 16 hex digits of SHA-256: enough to tell settings and structures apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None and item != {} and item != []}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _strict_json(text: str | bytes, *, where: str) -> Any:
    if len(text) > MAX_FILE_BYTES:
        raise PolicyError(f"{where}: larger than {MAX_FILE_BYTES // 2**20} MiB, no policy is")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise PolicyError(f"{where}: the key {twice[:200]!r} stands twice in one object")
        return data

    def refuse_constant(name: str) -> NoReturn:
        raise PolicyError(f"{where}: found {name}; JSON numbers are finite")

    def finite(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise PolicyError(f"{where}: the number {digits[:40]} is too large; JSON numbers are finite")
        return value

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        _check_depth(decoded, where=where)
        return json.loads(decoded, object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite)
    except UnicodeDecodeError as error:
        raise PolicyError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise PolicyError(f"{where}: not JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
    except ValueError as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"{where}: not JSON ({error})") from None


_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def _check_depth(text: str, *, where: str) -> None:
    depth = 0
    for character in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if character in "[{" else -1
        if depth > MAX_DEPTH:
            raise PolicyError(f"{where}: nested deeper than {MAX_DEPTH} levels, no policy is")


def _policy_error(error: ValidationError, *, where: str) -> PolicyError:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "[key]")
    place = f"{where}: ${path}" if path else where
    found = first.get("input")
    if first["type"] == "extra_forbidden":
        allowed = _allowed_keys(first["loc"][:-1])
        return PolicyError(
            f"{place}: unknown key; allowed: {', '.join(allowed)}{did_you_mean(str(first['loc'][-1]), allowed)}"
        )
    if first["type"] == "literal_error":
        options = re.findall(r"'([^']+)'", first["ctx"]["expected"])
        return PolicyError(
            f"{place}: found {_brief(found)}; allowed: {', '.join(options)}{did_you_mean(str(found), options)}"
        )
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if first["type"] == "value_error" else f": found {_brief(found)}"
    return PolicyError(f"{place}{shown}; {message[:1].lower() + message[1:]}" if shown else f"{place}: {message}")


def _allowed_keys(location: Iterable[str | int]) -> list[str]:
    model: type[BaseModel] = Policy
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        nested = [a for a in _annotations(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = nested[0] if nested else model
    return list(model.model_fields)


def _annotations(annotation: Any) -> list[Any]:
    return [annotation] + [inner for argument in get_args(annotation) for inner in _annotations(argument)]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
