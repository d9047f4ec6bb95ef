"""Which nodes of a model's ONNX graph stay in FP32 under a policy, by the exported graph's own names.

    program = torch.onnx.export(model, inputs, dynamo=True)          # the bare model, in eval mode
    nodes = nodes_by_precision(program, model, policy)
    float16.convert_float_to_float16(program.model_proto, node_block_list=nodes.fp32)

Needs the extra: pip install 'autoprec[onnx]'. Read in torch 2.14 (`torch.onnx`, `optimize=True`) and onnxscript 0.7.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.apply import applied_policy, read_structure
from autoprec.apply.plan import Plan, resolve_plan
from autoprec.emulation.rules import RULES
from autoprec.emulation.rules import Policy as Rule
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.integrations.setting import without_extra
from autoprec.policy import Policy

try:
    import onnx_ir
    import onnxscript  # noqa: F401 (torch.onnx.export needs it)
except ImportError as error:
    raise without_extra("The ONNX export", "onnx") from error

__all__ = ["GraphNodes", "export_graph", "nodes_by_precision"]

SCOPES, CLASSES, REWRITES = (
    "pkg.torch.onnx.name_scopes",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.onnxscript.rewriter.rule_name",
)
"""Metadata of a node: the modules around it, outermost first, and its operator; the rules that rewrote it."""

_IN_FP32 = {Rule.FP32, Rule.FP32_SET_OPT_DTYPE, Rule.FP32_APPEND_DTYPE}
_FP32_OPERATORS = {name.removeprefix("aten::").partition(".")[0] for name, rule in RULES.items() if rule in _IN_FP32}


@dataclass(frozen=True, slots=True)
class GraphNodes:
    """The named nodes of a graph, in its order.

    Attributes:
        fp32: of units that the policy computes in FP32: what a converter to FP16 must leave alone.
        autocast_fp32: of `autocast` units, the operators that autocast runs in FP32 (norms, softmax, losses); leave
            them in FP32, too, where the graph is to compute as the training did.
        low: all others.
        unplaced: nodes that carry no module's name, which follow the policy's default; a part of the three above.
    """

    fp32: list[str] = field(default_factory=list)
    autocast_fp32: list[str] = field(default_factory=list)
    low: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)


def export_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> torch.onnx.ONNXProgram:
    """Export the bare model, in eval mode, as torch does by default; the model's mode is put back.

    Raises:
        ApplyError: a policy is installed on the model: its casts would be part of the graph.
    """
    if applied_policy(model) is not None:
        raise ApplyError("the model has a policy, whose casts would be part of the graph; remove_policy first")
    was_training = model.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            program = torch.onnx.export(model.eval(), args, kwargs=kwargs, dynamo=True, verbose=False)
    finally:
        model.train(was_training)
    assert program is not None
    return program


def nodes_by_precision(program: torch.onnx.ONNXProgram, model: nn.Module, policy: Policy) -> GraphNodes:
    """Sort the nodes of an exported graph by what the policy gives the module whose code each comes from.

    A convolution into which a batch norm was folded is the convolution's, which owns its weight.

    Raises:
        ApplyError: the policy does not fit the model, or the graph carries no names of modules.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        plan = resolve_plan(read_structure(model), policy)
    nodes = GraphNodes()
    for node in onnx_ir.traversal.RecursiveGraphIterator(program.model.graph):
        if node.name is None:
            continue
        name = _module_of(node, plan)
        if name is None:
            nodes.unplaced.append(node.name)
        precision = plan.precision(name or "")
        if precision == "fp32":
            nodes.fp32.append(node.name)
        elif precision == "autocast" and _operator(node) in _FP32_OPERATORS:
            nodes.autocast_fp32.append(node.name)
        else:
            nodes.low.append(node.name)
    total = len(nodes.fp32) + len(nodes.autocast_fp32) + len(nodes.low)
    if len(nodes.unplaced) == total:
        raise ApplyError("the graph's nodes carry no names of modules; export it with torch.onnx.export(dynamo=True)")
    return nodes


def _module_of(node: Any, plan: Plan) -> str | None:
    """Return the innermost module that the policy knows around a node; None where nothing tells."""
    if "FuseBatchNorm" in node.metadata_props.get(REWRITES, ""):
        owner = _owner_of_weight(node, plan)
        if owner is not None:
            return owner
    scopes = _listed(node, SCOPES)
    for name in reversed(scopes):
        if name in plan.structure.modules:
            return name
    return None


def _owner_of_weight(node: Any, plan: Plan) -> str | None:
    for value in node.inputs:
        owner, _, _ = (value.name or "").rpartition(".") if value is not None else ("", "", "")
        if owner in plan.structure.modules and owner:
            return owner
    return None


def _operator(node: Any) -> str:
    """Return the aten operator that a node comes from: the last entry, `aten.layer_norm.default`."""
    classes = _listed(node, CLASSES)
    return classes[-1].removeprefix("aten.").partition(".")[0] if classes else ""


def _listed(node: Any, key: str) -> list[str]:
    """Read a list of names from a node's metadata, where it is the text of a Python list."""
    try:
        found = ast.literal_eval(node.metadata_props.get(key, "[]"))
    except (ValueError, SyntaxError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []
