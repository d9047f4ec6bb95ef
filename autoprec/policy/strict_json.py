"""Strict JSON for files that people hand around: finite numbers, no key twice, capped size and depth."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from autoprec.errors import PolicyError

__all__ = ["MAX_FILE_BYTES", "parse_strict_json"]

MAX_FILE_BYTES = 8 * 2**20
MAX_DEPTH = 32
MAX_DIGITS = 20
"""Of an integer of 64 bits, its sign among them."""


def parse_strict_json(text: str | bytes, *, where: str) -> Any:
    """Return the parsed value.

    Raises:
        PolicyError: not UTF-8 or not JSON, a number that is not finite or too large, a key twice,
            too large or too deep.
    """
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

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise PolicyError(f"{where}: the number {digits[:MAX_DIGITS]}... is too large; integers have 64 bits")
        return int(digits)

    def finite(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise PolicyError(f"{where}: the number {digits[:40]} is too large; JSON numbers are finite")
        return value

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        _check_depth(decoded, where=where)
        return json.loads(
            decoded,
            object_pairs_hook=unique,
            parse_constant=refuse_constant,
            parse_float=finite,
            parse_int=integer,
        )
    except UnicodeDecodeError as error:
        raise PolicyError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise PolicyError(f"{where}: not JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
    except ValueError as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"{where}: not JSON ({error})") from None


_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or what begins one and never ends it: else each quote in it would be a new start."""


def _check_depth(text: str, *, where: str) -> None:
    depth = 0
    for character in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if character in "[{" else -1
        if depth > MAX_DEPTH:
            raise PolicyError(f"{where}: nested deeper than {MAX_DEPTH} levels, no policy is")
