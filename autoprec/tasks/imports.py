"""Which files a file's code comes from: its imports, followed without running any of them."""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["is_installed", "with_imports"]


def with_imports(files: Iterable[Path]) -> set[Path]:
    """Return the files and those of every module that they import, and so on, wherever in the text the import stands.

    Modules of Python, of installed packages and of autoprec are left out, and so is what a text does not name
    (`importlib.import_module(name)`).
    """
    found: set[Path] = set()
    waiting = [file.resolve() for file in files]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported(file)
    return found


def is_installed(path: Path) -> bool:
    """Whether the file is part of Python, of an installed package or of autoprec itself."""
    path = path.resolve()
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        place in path.parents for place in _installed_places()
    )


@functools.cache
def _installed_places() -> tuple[Path, ...]:
    paths = map(sysconfig.get_path, ("stdlib", "platstdlib"))
    return (Path(__file__).parents[1], *(Path(path).resolve() for path in paths if path))


def _imported(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(alias.name, file)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                yield from _relative(name, file, node.level) if node.level else _absolute(name, file)


def _absolute(name: str, file: Path) -> Iterator[Path]:
    first, _, rest = name.partition(".")
    spec = PathFinder.find_spec(first, [str(_root(file))])
    if spec is None and first not in sys.stdlib_module_names:
        specs = (finder.find_spec(first, None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
    yield from _files(spec, rest)


def _relative(name: str, file: Path, level: int) -> Iterator[Path]:
    folder = file.parents[min(level, len(file.parents)) - 1]
    if (folder / "__init__.py").is_file():
        yield folder / "__init__.py"
    first, _, rest = name.partition(".")
    yield from _files(PathFinder.find_spec(first, [str(folder)]), rest)


def _root(file: Path) -> Path:
    """Return the folder that absolute imports of the file start from: where it lies, or where its package does."""
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _files(spec: ModuleSpec | None, rest: str) -> Iterator[Path]:
    """Yield the file of a module, and of what `rest` names inside it where that is a module, too."""
    if spec is None or (spec.origin is not None and is_installed(Path(spec.origin))):
        return
    if spec.origin is not None and spec.origin.endswith(".py"):
        yield Path(spec.origin).resolve()
    places = spec.submodule_search_locations
    if rest and places is not None:
        first, _, rest = rest.partition(".")
        yield from _files(PathFinder.find_spec(first, list(places)), rest)
