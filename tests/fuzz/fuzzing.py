"""Hostile inputs for every command, and what must hold of each: an exit code, one line, valid JSON, no secret, soon.

python tests/fuzz/fuzzing.py 600        # for ten minutes; prints the counts, and what was found
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from autoprec.cli.app import COMMANDS, main
from autoprec.policy import Policy

HANG_SECONDS = 30
EXIT_CODES = frozenset({0, 1, 2, 3, 4})
SECRET = "hunter2secret"
"""Stands for the password in every URL."""


@dataclass(frozen=True)
class Call:
    """One run of the program: its arguments, where `{name}` is the path of a file, and what is in the files."""

    arguments: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)


class HangError(BaseException):
    """Raised in a command that takes longer than `HANG_SECONDS`."""


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


@contextlib.contextmanager
def _in_folder(call: Call) -> Iterator[list[str]]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="autoprec-fuzz-") as name:
        paths = {key: str(Path(name) / key) for key in call.files}
        for key, data in call.files.items():
            Path(paths[key]).write_bytes(data)
        os.chdir(name)
        try:
            yield [paths.get(part[1:-1], part) if part.startswith("{") else part for part in call.arguments]
        finally:
            os.chdir(before)


def problem_of(call: Call) -> str | None:
    """Run the program on a call in this process; return what is wrong with how it ended, None where nothing is."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_SECONDS)
    code: Any = 0
    try:
        with _in_folder(call) as arguments, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = ["autoprec", *arguments]
            main()
    except SystemExit as ended:
        code = ended.code or 0
    except HangError:
        return "hang"
    except BaseException:
        return f"traceback: {traceback.format_exc()[-1500:]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return _problem(call, code, out.getvalue(), err.getvalue())


def _problem(call: Call, code: Any, out: str, err: str) -> str | None:
    if SECRET in out or SECRET in err:
        return f"secret: {out[-300:]}{err[-300:]}"
    if code not in EXIT_CODES:
        return f"exit code {code}"
    if "Traceback (most recent" in err + out:
        return f"traceback: {err[-1500:]}"
    told = [line for line in err.splitlines() if line.startswith("autoprec: ")]
    if code in (1, 2) and err and not told and "Error: " not in err and "Missing" not in err:
        return f"no line says why: {err[-300:]!r}"
    if len(told) > 1 or any(len(line) > 5_000 for line in told):
        return f"{len(told)} lines: {err[-600:]!r}"
    if told and not err.endswith(told[-1] + "\n"):
        return f"more after the line: {err[-600:]!r}"
    if code == 0 and "json" in call.arguments and not _is_strict_json(out):
        return f"no JSON: {out[:300]!r}"
    return None


def _is_strict_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


NAMES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["", ".", "..", "a" * 300, "layer4.*", "[" * 40, "-" * 3, "\x1b[31m", "\u202e", "a\nb", "{x}", "*" * 50]
    ),
    st.builds(lambda n: ".".join("a" * n), st.integers(0, 400)),
)
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, 1e39, 1e308, -0.0, True, None])
)
SCALARS = st.one_of(NUMBERS, NAMES, st.booleans(), st.none())
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
PRECISIONS = st.one_of(
    st.sampled_from(["fp32", "autocast", "fp16", "bf16"]), st.sampled_from(["fp8", "", "FP32"]), SCALARS
)


def _hostile(*good: str, fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[bytes]:
    """Return a file's bytes: of these fields or of others, one of the good texts cut and mended, or anything at all."""
    whole = st.fixed_dictionaries({}, optional=fields | {"unknown": VALUES})
    as_text = whole.map(lambda data: json.dumps(data).encode())

    @st.composite
    def cut(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(good)).encode()
        place = draw(st.integers(0, len(data)))
        more = draw(
            st.sampled_from([b"", b"}", b'"', b"[" * 2_000, b"9" * 5_000, b"\xff", b"NaN", b"\\", b"\x00", b"," * 9])
        )
        return data[:place] + more + data[draw(st.integers(place, min(len(data), place + 60))) :]

    return st.one_of(
        as_text,
        cut(),
        st.binary(max_size=200),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.sampled_from(
            [b"", b"{" * 50_000, b'"' + b'\\"' * 30_000, b"\xef\xbb\xbf{}", b"null", *(g.encode() for g in good)]
        ),
    )


_NUMBER = st.fixed_dictionaries({"value": NUMBERS, "kind": st.sampled_from(["measured", "predicted", "x"])})
_ARM = st.fixed_dictionaries({}, optional={"accuracy": _NUMBER, "peak_memory_bytes": _NUMBER, "note": NAMES})
POLICIES = _hostile(
    Policy(modules={"layer4": "fp32", "layer4.0": "bf16", "*.norm": "fp32"}).to_json(),
    '{"default": "fp16", "modules": {"0": "fp32"}, "grad_scaler": {"init_scale": 1024.0}}',
    fields={
        "schema_version": st.one_of(st.just(1), NUMBERS),
        "default": PRECISIONS,
        "dtype": PRECISIONS,
        "modules": st.dictionaries(NAMES, PRECISIONS, max_size=6),
        "grad_scaler": st.one_of(
            VALUES,
            st.fixed_dictionaries({}, optional={"init_scale": NUMBERS, "growth_interval": NUMBERS}),
        ),
        "optimizer": st.one_of(VALUES, st.fixed_dictionaries({}, optional={"eps": NUMBERS, "name": NAMES})),
        "training": st.one_of(VALUES, st.fixed_dictionaries({}, optional={"accumulation_steps": NUMBERS})),
        "model": st.one_of(
            VALUES,
            st.fixed_dictionaries({
                "name": NAMES,
                "fingerprint": NAMES,
                "modules": st.dictionaries(
                    NAMES, st.fixed_dictionaries({"type": NAMES, "parameters": VALUES}), max_size=3
                ),
            }),
        ),
        "evidence": st.one_of(
            VALUES, st.fixed_dictionaries({}, optional={"arm": NAMES, "arms": st.dictionaries(NAMES, _ARM, max_size=3)})
        ),
        "recommendation": VALUES,
        "provenance": VALUES,
    },
)  # fmt: skip
FRONTS = _hostile(
    '{"study_name": "s", "task": "t", "target": "a", "choice": {"kind": "fp32", "name": "fp32"}, "front": []}',
    '{"front": [{"name": "fp32", "policy": {"default": "fp32"}}], "sentence": "x"}',
    fields={
        "front": VALUES,
        "study_name": NAMES,
        "choice": VALUES,
        "sentence": NAMES,
        "margin": NUMBERS,
        "target": NAMES,
    },
)
RANGES = st.fixed_dictionaries({}, optional={"choices": st.lists(NUMBERS, max_size=3), "low": NUMBERS, "high": NUMBERS})


def _toml(data: dict[str, Any]) -> bytes:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(str(key))} = {shown(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(shown, value)) + "]"
        return '"none"' if value is None else json.dumps(value)

    return "".join(f"{json.dumps(key)} = {shown(value)}\n" for key, value in data.items()).encode()


SPACES = st.one_of(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={
            "inherits": st.one_of(NAMES, VALUES, st.just("vision")),
            "granularity": NAMES,
            "choices": st.lists(PRECISIONS, max_size=4),
            "rules": VALUES,
            "grad_scaler": st.fixed_dictionaries({}, optional={"init_scale": RANGES, "growth_interval": RANGES}),
            "optimizer": st.fixed_dictionaries({}, optional={"eps": RANGES, "amsgrad": RANGES}),
        },
    ).map(_toml),
    _hostile("name = 'mine'\ninherits = 'vision'\n[grad_scaler]\ninit_scale = {low = 1.0, high = 8.0}\n", fields={}),
)


@st.composite
def _urls(draw: st.DrawFn) -> str:
    scheme = draw(
        st.sampled_from(["postgresql", "postgresql+psycopg", "mysql", "sqlite", "postgres", "redis", "", "x y"])
    )
    user = draw(
        st.sampled_from(["", "me@", f"me:{SECRET}@", f"me:p@{SECRET}@", f"me:{SECRET}/@", f":{SECRET}@", f"{SECRET}@"])
    )
    host = draw(st.sampled_from(["localhost", "127.0.0.1", "[::1]", "", "no.such.host.invalid", f"{SECRET}@localhost"]))
    port = draw(st.sampled_from([":1", ":1", f":{SECRET}", ":99999999", ":", ":-1"]))
    database = draw(st.sampled_from(["/db", "", "/", "/no/such/folder/x.db", "/a/../b", f"/{'d' * 300}"]))
    query = draw(
        st.sampled_from(["", "?", f"?password={SECRET}", f"?sslpassword={SECRET}", f"?options={SECRET}", f"?{SECRET}"])
    )
    url = f"{scheme}://{user}{host}{port}{database}{query}"
    return draw(
        st.sampled_from([url, url, url.replace("//", "/"), url.replace("://", ":"), f"{SECRET}", f"password={SECRET}"])
    )


URLS = _urls()
WORDS = NAMES.filter(lambda word: not word.startswith("-"))
OPTIONS = st.lists(
    st.tuples(
        st.sampled_from(["--format", "--seed", "--lr", "--batch-size", "--steps", "--margin", "--device", "--gpu",
                         "--no-such", "--memory-budget", "--space", "--sampler", "--prefer", "--n-trials", "--port"]),
        st.one_of(WORDS, NUMBERS.map(str), st.just("9" * 23)),
    ),
    max_size=2,
).map(lambda pairs: tuple(part for pair in pairs for part in pair))  # fmt: skip


def _call(*parts: Any, **files: st.SearchStrategy[bytes]) -> st.SearchStrategy[Call]:
    """Return calls of the parts: words, and strategies of one word or of a tuple of them."""

    @st.composite
    def build(draw: st.DrawFn) -> Call:
        drawn = [draw(part) if isinstance(part, st.SearchStrategy) else part for part in parts]
        arguments = [word for part in drawn for word in (part if isinstance(part, tuple) else (part,))]
        return Call(tuple(arguments), {name: draw(data) for name, data in files.items()})

    return build()


FORMATS = st.sampled_from([(), ("--format", "json"), ("--format", "text")])
NO_MODEL = WORDS.map(lambda word: f"no-such-model-{word}")
CALLS: dict[str, st.SearchStrategy[Call]] = {
    # A storage that cannot be opened, or a model that is not there, ends what would train.
    "search": st.one_of(
        _call("search", "--storage", URLS, "--study-name", WORDS, "--model", NO_MODEL, OPTIONS),
        _call("search", "--model", NO_MODEL, "-o", WORDS, OPTIONS),
    ),
    "worker": _call("worker", "--storage", URLS, "--study-name", WORDS, "--model", NO_MODEL, OPTIONS),
    "verify": _call("verify", "{policy}", "--model", NO_MODEL, FORMATS, OPTIONS, policy=POLICIES),
    "choose": _call("choose", st.sampled_from([".", "{front}"]), OPTIONS, front=FRONTS),
    "show": st.one_of(
        _call("show", "{policy}", FORMATS, policy=POLICIES), _call("show", "{front}", FORMATS, front=FRONTS)
    ),
    "report": _call("report", st.sampled_from([".", "{front}"]), OPTIONS, front=FRONTS),
    "dashboard": _call("dashboard", ".", "--storage", URLS, front=FRONTS).map(
        lambda call: Call(call.arguments, {"front.json": call.files["front"]})
    ),
    "diff": _call("diff", "{first}", "{second}", FORMATS, first=POLICIES, second=POLICIES),
    "check": _call("check", "{policy}", "--model", st.one_of(st.just("mlp"), NO_MODEL), FORMATS, policy=POLICIES),
    "export": _call(
        "export", "{policy}", "--to", st.sampled_from(["deepspeed", "accelerate", "lightning", "fsdp2", "x"]),
        st.one_of(st.just(()), WORDS.map(lambda word: ("-o", word))), policy=POLICIES,
    ),
    "estimate": _call("estimate", "--model", NO_MODEL, "--memory-budget", st.one_of(WORDS, st.just("1GB")), OPTIONS),
    "doctor": _call("doctor", "--task", st.one_of(WORDS, st.just("{task}:x")), OPTIONS, task=st.binary(max_size=60)),
    "spaces": st.one_of(_call("spaces", "{space}", space=SPACES), _call("spaces", WORDS)),
    "init": _call("init", WORDS, OPTIONS),
}  # fmt: skip
assert set(CALLS) == set(COMMANDS)


def explore(command: str, *, num_examples: int, number: int, check: Callable[[Call], None]) -> None:
    """Run one command on generated calls; `number` decides which."""

    @seed(number)
    @settings(
        max_examples=num_examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(CALLS[command])
    def each(call: Call) -> None:
        check(call)

    each()


def run_for(seconds: float) -> int:
    """Fuzz all commands in turn for so long; print the counts and what was found; return the number of findings."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    slowest = 0.0

    def check(call: Call) -> None:
        nonlocal slowest
        if time.monotonic() >= ends:
            return
        started = time.monotonic()
        problem = problem_of(call)
        slowest = max(slowest, time.monotonic() - started)
        counts[call.arguments[0]] += 1
        if problem is not None:
            counts[problem.partition(":")[0]] += 1
            found.append(f"{call}\n{problem}")

    ends = time.monotonic() + seconds
    number = 0
    while time.monotonic() < ends:
        for command in CALLS:
            explore(command, num_examples=10, number=number, check=check)
        number += 1
    print("\n\n".join(found[:20]))
    kinds = {kind: counts[kind] for kind in ("traceback", "hang", "secret")}
    print(f"{sum(counts[name] for name in CALLS):,} calls: {dict(counts.most_common())}")
    print(f"{kinds}, {len(found)} findings in all; the slowest call took {slowest:.1f} s")
    return len(found)


if __name__ == "__main__":
    sys.exit(run_for(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0) > 0)
