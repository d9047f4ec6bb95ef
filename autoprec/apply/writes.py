"""Find the tensors of a module that have to stay FP32 in a half region: those that its own code writes to, and the
tables of embeddings with sparse gradients. Reads code, runs none.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autoprec.apply.casts import plain_tensors
from autoprec.apply.checkpointing import own_forward
from autoprec.apply.trees import CASTABLE

__all__ = ["changes_arguments", "tensors_kept", "written_parameters"]

MAX_DEPTH = 3
_EVERY = "*"
_NORMS = frozenset({"batch_norm", "instance_norm"})
_WRITERS = _NORMS | {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"}
"""Functions that write into a tensor they are given, beside those whose name ends with an underscore."""
_RUNNING = ("running_mean", "running_var")
_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_"})
_OWN_BUFFERS = frozenset({"buffers", "named_buffers"})
_VIEWS = frozenset(
    {"detach", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "squeeze", "unsqueeze", "narrow",
     "select", "diagonal", "view_as", "expand", "chunk", "split", "unbind"}
)  # fmt: skip
_Functions = dict[str, list[types.FunctionType]]
_KNOWN_BUFFERS: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
_KNOWN_PARAMETERS: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def tensors_kept(module: nn.Module) -> set[str]:
    """Return the names of the module's own floating tensors that a half region leaves in FP32.

    A cast has no gradient for a sparse one, and what the forward writes into a cast is lost.
    """
    buffers = _castable(module._buffers)
    found = set(_written_attributes(type(module))) if buffers else set()
    function = _own_function(module)
    if function is not None and buffers:
        found |= _Reader(type(module), 0).read(function, {})
    is_sparse_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    plain = {name for name in plain_tensors(module) if module.__dict__[name].dtype in CASTABLE}
    kept = (buffers if _EVERY in found else buffers & found) | _written_in_place(module, plain)
    return kept | {"weight"} if is_sparse_table else kept


def written_parameters(module: nn.Module) -> set[str]:
    """Return the names of the floating parameters that the module's forward is seen to write to."""
    return _written_in_place(module, set())


def changes_arguments(module: nn.Module) -> bool:
    """Whether the code of the module's forward is seen to change one of its arguments in place."""
    function = _own_function(module) or type(module).forward
    if not isinstance(function, types.FunctionType) or function.__module__.startswith("torch."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return True
    code = function.__code__
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self"}
    return any(_root_name(target) in names for node in ast.walk(tree) for target in _changed_by(node))


def _changed_by(node: ast.AST) -> list[ast.AST]:
    """Return the expressions whose tensors one statement or call changes in place."""
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Assign):
        return [target for target in node.targets if isinstance(target, ast.Subscript)]
    if isinstance(node, ast.Call):
        is_in_place = _last_name(node.func).endswith("_") and not _last_name(node.func).endswith("__")
        return [node.func.value] if is_in_place and isinstance(node.func, ast.Attribute) else []
    return []


def _root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _written_in_place(module: nn.Module, plain: set[str]) -> set[str]:
    tensors = _castable(module._parameters) | plain
    if not tensors:
        return set()
    found = set(_written_in_forward(type(module)))
    function = _own_function(module)
    if function is not None:
        found |= _Reader(type(module), 0, in_place=True).read(function, {})
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        found.add("weight")
    return tensors & found


def _castable(tensors: Mapping[str, torch.Tensor | None]) -> set[str]:
    return {name for name, tensor in tensors.items() if tensor is not None and tensor.dtype in CASTABLE}


def _own_function(module: nn.Module) -> types.FunctionType | None:
    forward = own_forward(module)
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    return function if isinstance(function, types.FunctionType) else None


def _written_attributes(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that any method but the constructor writes to."""
    if cls not in _KNOWN_BUFFERS:
        functions = [function for name, each in _methods(cls).items() if name != "__init__" for function in each]
        found = [_Reader(cls, 0).read(function, {}) for function in functions]
        _KNOWN_BUFFERS[cls] = frozenset().union(*found)
    return _KNOWN_BUFFERS[cls]


def _written_in_forward(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that the forward, or a method it names, writes to; torch's own layers write to none."""
    if cls not in _KNOWN_PARAMETERS:
        methods = _methods(cls)
        found: set[str] = set()
        seen, left = set(), ["forward"]
        while left:
            name = left.pop()
            if name in seen or name not in methods:
                continue
            seen.add(name)
            for function in methods[name]:
                left += _code_names(function.__code__)
                if not (function.__module__ or "").startswith("torch."):
                    found |= _Reader(cls, 0, in_place=True).read(function, {})
        _KNOWN_PARAMETERS[cls] = frozenset(found)
    return _KNOWN_PARAMETERS[cls]


def _methods(cls: type[nn.Module]) -> _Functions:
    methods: _Functions = {}
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, member in list(vars(base).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function)
    return methods


class _Reader(ast.NodeVisitor):
    """Reads one function; `aliases` maps a local name to the attributes of self that it may stand for.

    For buffers whatever is in doubt counts as written. `in_place` (for parameters and plain attributes, which products
    need in half): an attribute set anew is no write, the result of a method that is no view is another tensor, and code
    without source writes to nothing.
    """

    def __init__(self, cls: type[nn.Module], depth: int, *, in_place: bool = False) -> None:
        self.cls = cls
        self.depth = depth
        self.in_place = in_place
        self.written: set[str] = set()
        self.aliases: dict[str, set[str]] = {}
        self.self_name = ""
        self.globals: dict[str, Any] = {}

    def read(self, function: types.FunctionType, aliases: dict[str, set[str]], *, bound: bool = True) -> set[str]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError, ValueError):
            return set() if self.in_place else _by_names(function)
        parameters = function.__code__.co_varnames
        self.self_name = parameters[0] if bound and function.__code__.co_argcount else ""
        self.globals = function.__globals__
        self.aliases = {name: set(values) for name, values in aliases.items()}
        for _ in range(2):  # aliases made below their first use, in a loop
            self.visit(tree)
        return self.written

    def base(self, node: ast.AST | None) -> set[str]:
        """Return the attributes of self whose storage an expression may share."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, set())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self.self_name and self.self_name:
                return {_EVERY} if node.attr == "_buffers" else {node.attr}
            return self.base(node.value) if node.attr in ("data", "T", "mT") else set()
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self.base(node.value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return set().union(*(self.base(item) for item in node.elts))
        if isinstance(node, ast.IfExp):
            return self.base(node.body) | self.base(node.orelse)
        if isinstance(node, ast.NamedExpr):
            return self.base(node.value)
        return self._base_of_call(node) if isinstance(node, ast.Call) else set()

    def _base_of_call(self, node: ast.Call) -> set[str]:
        name = _last_name(node.func)
        if isinstance(node.func, ast.Name) and name == "getattr" and len(node.args) > 1 and self._is_self(node.args[0]):
            return _constant(node.args[1])
        if not isinstance(node.func, ast.Attribute):
            return (
                set().union(*(self.base(item) for item in node.args)) if name in ("zip", "list", "enumerate") else set()
            )
        if name in _OWN_BUFFERS and self._is_self(node.func.value):
            return {_EVERY}
        return set() if self.in_place and name not in _VIEWS else self.base(node.func.value)

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name != ""

    def _store(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                self._store(item, value)
        elif isinstance(target, ast.Name):
            self.aliases.setdefault(target.id, set()).update(self.base(value))
        elif self.in_place and isinstance(target, ast.Attribute) and self._is_self(target.value):
            return
        elif isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
            self.written |= self.base(target)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._store(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._store(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._store(node.target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.written |= self.base(node.target)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._store(node.target, node.iter)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _last_name(node.func)
        writes = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
        if writes and isinstance(node.func, ast.Attribute):
            self.written |= self.base(node.func.value)
        if name in _NORMS:
            given = [*node.args[1:3], *(k.value for k in node.keywords if k.arg in _RUNNING)]
            given += [] if self.in_place else node.args[3:5]  # where torch.batch_norm takes them
            self.written |= set().union(*map(self.base, given))
        elif writes or name in _WRITERS:
            self.written |= set().union(*(self.base(item) for item in [*node.args, *(k.value for k in node.keywords)]))
        if name == "setattr" and not self.in_place and len(node.args) > 1 and self._is_self(node.args[0]):
            self.written |= _constant(node.args[1])
        for keyword in node.keywords:
            if keyword.arg == "out":
                self.written |= self.base(keyword.value)
        self._follow(node)
        self.generic_visit(node)

    def _follow(self, node: ast.Call) -> None:
        """Read a called function of the user's own that is given buffers."""
        given = [self.base(item) for item in node.args]
        named = {k.arg: self.base(k.value) for k in node.keywords if k.arg is not None}
        if self.depth >= MAX_DEPTH or not any([*given, *named.values()]):
            return
        function, bound = self._resolve(node.func)
        if function is None or (function.__module__ or "").split(".")[0] == "torch":
            return
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount][1 if bound else 0 :]
        aliases = dict(zip(parameters, given, strict=False)) | {k: v for k, v in named.items() if v}
        self.written |= _Reader(self.cls, self.depth + 1, in_place=self.in_place).read(function, aliases, bound=bound)

    def _resolve(self, node: ast.AST) -> tuple[types.FunctionType | None, bool]:
        found: Any = None
        bound = False
        if isinstance(node, ast.Name):
            found = self.globals.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if self._is_self(node.value):
                member = inspect.getattr_static(self.cls, node.attr, None)
                bound = not isinstance(member, staticmethod)
                found = getattr(member, "__func__", member)
            elif isinstance(owner := self.globals.get(node.value.id), types.ModuleType):
                found = vars(owner).get(node.attr)
        found = inspect.unwrap(found) if callable(found) and not isinstance(found, type) else found
        return (found, bound) if isinstance(found, types.FunctionType) else (None, False)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.AST) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else {_EVERY}


def _by_names(function: types.FunctionType) -> set[str]:
    """Without source: every attribute named by code that also names an in-place method."""
    names = set(_code_names(function.__code__))
    in_place = any(name.endswith("_") and not name.endswith("__") for name in names) or names & _WRITERS
    return names if in_place or names & {"setattr", "_buffers"} else set()


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)
