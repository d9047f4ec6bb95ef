"""The policy itself: a frozen value, its JSON form and its errors."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from autoprec.errors import PolicyError, did_you_mean, in_one_line
from autoprec.policy.evidence import (
    Evidence,
    FrozenDict,
    FrozenModel,
    GradScalerSettings,
    LowPrecision,
    ModelInfo,
    OptimizerSettings,
    Precision,
    Provenance,
    Recommendation,
    TrainingOptions,
    check_names,
)
from autoprec.policy.files import write_atomically
from autoprec.policy.precedence import is_glob
from autoprec.policy.strict_json import MAX_FILE_BYTES, parse_strict_json

__all__ = ["SCHEMA_VERSION", "Policy", "content_hash", "load_policy"]

SCHEMA_VERSION = 1
MAX_GLOBS = 200
MAX_MODULES = 50_000
MAX_NAME, MAX_PARTS = 500, 100


class Policy(FrozenModel):
    """A whole policy. Only `default`, `modules` and `dtype` are what a person would write.

    `Policy(default="autocast", modules={"layer4.*": "fp32"}, dtype="fp16")`

    `dtype` is the low precision of `autocast`. `grad_scaler` None means torch's defaults where
    a scaler is needed. `training` None means an ordinary one.
    """

    schema_version: int = SCHEMA_VERSION
    default: Precision = "autocast"
    dtype: LowPrecision = "fp16"
    modules: dict[str, Precision] = Field(default_factory=dict)
    grad_scaler: GradScalerSettings | None = None
    optimizer: OptimizerSettings | None = None
    training: TrainingOptions | None = None
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
        check_names(modules)
        num_globs = sum(is_glob(rule) for rule in modules)
        if num_globs > MAX_GLOBS:
            raise ValueError(f"{num_globs:,} globs; {MAX_GLOBS:,} at most, since each is held against each module")
        return FrozenDict(modules)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Refuse what no model has, and what would keep every reader busy."""
        known: dict[str, Mapping[str, Any]] = {
            "modules": self.modules,
            "model.modules": {} if self.model is None else self.model.modules,
            "evidence.units": {} if self.evidence is None else self.evidence.units,
        }
        for place, names in known.items():
            if len(names) > MAX_MODULES:
                raise ValueError(f"{place} names {len(names):,} modules; {MAX_MODULES:,} at most")
            deep = next((name for name in names if name.count(".") >= MAX_PARTS or len(name) > MAX_NAME), None)
            if deep is not None:
                raise ValueError(
                    f"{place}: the name {deep[:40]!r}... is too long; {MAX_NAME} characters and {MAX_PARTS} modules"
                    " inside each other at most"
                )
        return self

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
        data = parse_strict_json(text, where=where)
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


def content_hash(text: str) -> str:
    """Return the first 16 hex digits of SHA-256: enough to tell settings and structures apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None and item != {} and item != []}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _policy_error(error: ValidationError, *, where: str) -> PolicyError:
    first = error.errors(include_url=False)[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{in_one_line(part)}" for part in first["loc"] if part != "[key]"
    )
    place = f"{where}: ${path}" if path else where
    found = first.get("input")
    if first["type"] == "extra_forbidden":
        allowed = _allowed_keys(first["loc"][:-1])
        return PolicyError(
            f"{place}: unknown key; allowed: {', '.join(allowed)}{did_you_mean(str(first['loc'][-1])[:80], allowed)}"
        )
    if first["type"] == "literal_error":
        options = re.findall(r"'([^']+)'", first["ctx"]["expected"])
        return PolicyError(
            f"{place}: found {_brief(found)}; allowed: {', '.join(options)}{did_you_mean(str(found)[:80], options)}"
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
