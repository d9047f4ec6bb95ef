"""Run by a process of its own: `python deepspeed_checks.py parse TEXTS | train CONFIG [POLICY] | plain POLICY`."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import torch
import torch.nn.functional as F
from digits_training import LR, micro_batches, network
from torch import nn

from autoprec import Policy, apply_policy, build_optimizer
from autoprec.probes.dtypes import watch_dtypes

NUM_STEPS = 100


def parse(texts: str) -> list[dict[str, Any]]:
    from deepspeed.runtime.config import DeepSpeedConfig

    answers = []
    for text in json.loads(texts):
        read = DeepSpeedConfig(json.loads(text))
        answers.append(
            {
                "stage": int(read.zero_optimization_stage),
                "micro_batch": read.train_micro_batch_size_per_gpu,
                "clipping": read.gradient_clipping,
                "accumulation": read.gradient_accumulation_steps,
                "fp16": read.float16_config.enabled,
                "bf16": read.bfloat16_config.enabled,
                "autocast": str(read.torch_autocast_dtype) if read.torch_autocast_enabled else None,
                "init_scale": read.float16_config.initial_dynamic_scale(),
                "scale_window": read.float16_config.loss_scale_window,
            }
        )
    return answers


def computed(model: nn.Module) -> dict[str, list[str]]:
    with watch_dtypes(model) as log:
        model(next(iter(micro_batches(1)))[0])
    return {name: sorted(map(str, log[name].computed)) for name in ("norm", "head")}


def train(config: str, policy: str | None = None) -> dict[str, Any]:
    import deepspeed

    settings = json.loads(config)
    model = network()
    if policy is not None:
        apply_policy(model, Policy.from_json(policy))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    dtype = torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32
    losses = []
    for images, labels in micro_batches(NUM_STEPS):
        loss = F.cross_entropy(engine(images.to(dtype)).float(), labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    parameters = sorted({str(p.dtype) for p in engine.module.parameters()})
    return {"losses": losses, "parameters": parameters, "computed": computed(model) if policy is not None else {}}


def plain(policy: str) -> dict[str, Any]:
    found = Policy.from_json(policy)
    model = apply_policy(network(), found)
    optimizer = build_optimizer(found, torch.optim.Adam, model.parameters(), lr=LR)
    losses = []
    for images, labels in micro_batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "computed": computed(model)}


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


if __name__ == "__main__":
    import os

    os.environ["MASTER_PORT"] = free_port()
    torch.set_num_threads(1)
    answer = {"parse": parse, "train": train, "plain": plain}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(answer))
