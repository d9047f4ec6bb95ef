"""The nodes to keep in FP32, by the graph's own names: all there, none of a low unit; a converter takes the list."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")

from autoprec import Policy, apply_policy
from autoprec.cli import main
from autoprec.errors import ApplyError
from autoprec.integrations.onnx import GraphNodes, export_graph, nodes_by_precision


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


RESNET = Policy(default="fp16", modules={"layer4": "fp32", "layer2": "autocast", "bn1": "fp32", "fc": "fp32"})
VIT = Policy(default="autocast", modules={"encoder.layers.encoder_layer_1": "fp32", "heads": "fp16"})
MODELS: dict[str, tuple[Callable[[], nn.Module], Policy]] = {"resnet": (resnet, RESNET), "vit": (vit, VIT)}
FP32_SCOPES = {"resnet": ("layer4", "fc"), "vit": ("encoder.layers.encoder_layer_1",)}
"""The modules of the policies above whose nodes are to be FP32; `bn1` is folded into the convolution before it."""


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request: pytest.FixtureRequest) -> tuple[str, Any, nn.Module, GraphNodes]:
    build, policy = MODELS[request.param]
    model = build()
    program = export_graph(model, (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),))
    return request.param, program, model, nodes_by_precision(program, model, policy)


def scopes(node: Any) -> str:
    return next(prop.value for prop in node.metadata_props if prop.key == "pkg.torch.onnx.name_scopes")


def test_every_node_named_is_in_the_graph_and_no_node_of_a_low_unit_is_named(exported: Any) -> None:
    kind, program, _, nodes = exported
    graph = {node.name: node for node in program.model_proto.graph.node}
    assert set(nodes.fp32) <= set(graph)
    assert len(graph) == len(nodes.fp32) + len(nodes.autocast_fp32) + len(nodes.low)
    assert nodes.unplaced == []
    inside = {name for name, node in graph.items() if any(f"'{scope}'" in scopes(node) for scope in FP32_SCOPES[kind])}
    assert set(nodes.fp32) == inside
    assert len(inside) >= 5


def test_of_autocast_units_the_norms_are_listed_apart(exported: Any) -> None:
    kind, program, _, nodes = exported
    types = {node.name: node.op_type for node in program.model_proto.graph.node}
    found = [types[name] for name in nodes.autocast_fp32]
    assert found == (["LayerNormalization"] * 3 if kind == "vit" else [])


def test_a_convolution_with_a_folded_batch_norm_is_the_convolutions(exported: Any) -> None:
    kind, program, model, _ = exported
    if kind == "vit":
        pytest.skip("no batch norm")
    policy = Policy(default="fp32", modules={"bn1": "fp16"})
    first = next(node.name for node in program.model_proto.graph.node if node.op_type == "Conv")
    assert first in nodes_by_precision(program, model, policy).fp32
    half = nodes_by_precision(program, model, policy.replace(modules={"conv1": "fp16"}))
    assert first in half.low


def test_a_converter_to_fp16_leaves_the_listed_nodes_in_fp32_and_the_graph_runs(exported: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    onnx = pytest.importorskip("onnx")
    _, program, model, nodes = exported
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    converted = float16.convert_float_to_float16(program.model_proto, keep_io_types=True, node_block_list=nodes.fp32)
    half = onnx.TensorProto.FLOAT16
    halves = {each.name for each in converted.graph.initializer if each.data_type == half}
    listed, others = set(nodes.fp32), set(nodes.low)
    read_by = {name: {each.name for each in converted.graph.node if name in each.input} for name in halves}
    assert any(readers & others for readers in read_by.values())
    assert not any(readers & listed for readers in read_by.values())
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    output = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    with torch.no_grad():
        expected = model.eval()(images)
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=2e-2, rtol=2e-2)


def test_a_model_with_a_policy_is_refused_and_the_mode_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    export_graph(model, (torch.ones(1, 2),))
    assert model.training
    apply_policy(model, Policy(default="autocast"))
    with pytest.raises(ApplyError, match="casts would be part of the graph; remove_policy first"):
        export_graph(model, (torch.ones(1, 2),))


def test_the_command_lists_the_nodes_of_a_task_by_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Policy(default="autocast", modules={"6": "fp32"}).save(tmp_path / "policy.json")
    monkeypatch.setattr(
        "sys.argv", ["autoprec", "export", str(tmp_path / "policy.json"), "--to", "onnx", "--model", "mlp"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert len(data["keep_in_fp32"]) >= 1
    assert f"{len(data['keep_in_fp32'])} nodes of fp32 units" in printed.err
