"""The code of docs/integrations.md runs as it is printed; that of its exports is in test_onnx_nodes.py."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

from digits_training import POLICY, loader, micro_batches, network

import autoprec
from autoprec import Policy

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = {
    heading: re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL)
    for heading, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
}


SHARDED = ("FSDP2", "ZeroRedundancyOptimizer")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names_for(section: str, folder: Path) -> dict[str, Any]:
    """What the page takes for granted: a model, batches and the like of the reader's own."""
    if section == "Trainer of transformers":
        from test_hf_trainer import POLICY as OF_BERT
        from test_hf_trainer import Passages, arguments, model

        OF_BERT.save("policy.json")
        data = {"train_dataset": Passages(), "eval_dataset": Passages(held_out=True)}
        return {"model": model(), "training_arguments": arguments(folder, max_steps=3), **data}
    POLICY.save("policy.json")
    if section == "Lightning":
        from test_lightning_plugin import Digits

        return {"module": Digits(), "train_loader": loader(), "held_out_loader": loader()}
    if section == "Searching inside them":
        from framework_tasks import digits_module

        module, data, _ = digits_module()
        return {"LitDigits": lambda: module, "DigitsData": lambda: data}
    if section in SHARDED:
        policy = Policy(default="bf16", modules={"head": "fp32"})
        blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(4, 2)))
        return {"model": model, "policy": policy, "mesh": init_device_mesh("cpu", (1,))}
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    return {"net": net, "optimizer": optimizer, "batches": list(micro_batches(4)), "train_loader": loader()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "section", [heading for heading, blocks in SECTIONS.items() if blocks and heading != "Exports"]
)
def test_the_code_of_a_section_runs(
    section: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if section in SHARDED:
        request.getfixturevalue("group")
    given = {"autoprec": autoprec, "torch": torch, "F": F, "DistributedDataParallel": DistributedDataParallel}
    names = given | names_for(section, tmp_path)
    for block in SECTIONS[section]:
        exec(compile(block, f"{PAGE.name}: {section}", "exec"), names)
    if section == "Searching inside them":
        from autoprec.tasks.lightning_modules import lightning_task

        task = lightning_task(names["make"], name="make")
        assert (task.metric_name, task.accumulation_steps, task.max_grad_norm) == ("val_accuracy", 2, 1.0)
    elif section == "Trainer of transformers":
        assert autoprec.remove_policy(names["model"]) is names["trainer"].model
        assert names["trainer"].state.global_step == 3
    elif section in SHARDED:
        assert isinstance(names["optimizer"], torch.optim.Optimizer)
    elif section == "Lightning":
        assert names["trainer"].global_step == 100
    else:
        assert any((tmp_path / name).exists() for name in ("middle.ckpt", "state"))


def test_every_module_of_the_room_has_its_section() -> None:
    assert {"Lightning", "Fabric", "Accelerate", "Trainer of transformers"} <= set(SECTIONS)
