"""The shapes of well-known training code, each a small model of its own: how models, losses, optimizers are built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.tasks.language import next_token_batches


def with_decay(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups by the rank of a parameter, from the model, as minGPT and nanoGPT build theirs."""
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == wide]} for wide in (True, False)]
    return torch.optim.AdamW([groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}], lr=3e-3)


def images(*, size: int = 16, num: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pixels = torch.randn(num, 8, 3, size, size)
    return [(x, (x.mean((1, 2, 3)) > 0).long()) for x in pixels]


class Block(nn.Module):
    """A transformer block whose feed-forward is a lambda over the block's own layers."""

    def __init__(self, width: int, length: int, *, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
        self.fused = fused
        if not fused:
            self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
            m = self.mlp
            self.mlpf = lambda x: m["c_proj"](F.gelu(m["c_fc"](x)))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.size()
        q, k, v = (y.view(n, t, 2, c // 2).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            y = F.softmax(scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(n, t, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.ln_1(x))
        hidden = self.ln_2(x)
        return x + (self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](hidden))) if self.fused else self.mlpf(hidden))


class Gpt(nn.Module):
    """Tied weights, positions by a range, and the loss inside: logits and targets by `view`."""

    def __init__(self, *, fused: bool, width: int = 16, length: int = 24) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(64, width), "wpe": nn.Embedding(length, width), "ln_f": nn.LayerNorm(width)}
        blocks = nn.ModuleList(Block(width, length, fused=fused) for _ in range(2))
        self.transformer = nn.ModuleDict(parts | {"h": blocks})
        self.lm_head = nn.Linear(width, 64, bias=False)
        if fused:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        t = self.transformer
        x = t["wte"](idx) + t["wpe"](torch.arange(idx.size(1), device=idx.device))
        for block in t["h"]:
            x = block(x)
        logits = self.lm_head(t["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, *, lr: float) -> torch.optim.Optimizer:
        optimizer = with_decay(self)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return optimizer


def language_task(name: str, *, fused: bool, optimizer: Callable[..., Any]) -> autoprec.Task:
    documents = [torch.arange(800) * 7 % 61]
    train, held_out = next_token_batches(documents, data="numbers", length=24, batch_size=8)
    return autoprec.Task(
        name=name, model=lambda: Gpt(fused=fused), train_batches=train, eval_batches=held_out,
        loss=lambda model, batch: model(*batch)[1], optimizer=optimizer, max_grad_norm=1.0,
    )  # fmt: skip


def mingpt() -> autoprec.Task:
    return language_task("mingpt", fused=False, optimizer=with_decay)


def nanogpt() -> autoprec.Task:
    return language_task("nanogpt", fused=True, optimizer=lambda model: model.configure_optimizers(lr=3e-3))


class Preact(nn.Module):
    """pytorch-cifar's blocks: an empty Sequential as shortcut, functional activations and pooling."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.conv2, self.shortcut = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


class Cifar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 8, 3, 1, 1), nn.Sequential(Preact(8, 8, 1), Preact(8, 16, 2))
        self.linear = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.avg_pool2d(self.layers(self.stem(x)), 8)
        return self.linear(out.view(out.size(0), -1))


def cifar() -> autoprec.Task:
    made, criterion = images(), nn.CrossEntropyLoss()
    return autoprec.Task(
        name="cifar", model=Cifar, train_batches=made, eval_batches=made[:2],
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        optimizer=torch.optim.SGD, optimizer_settings={"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4},
        scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps),
    )  # fmt: skip


class Unet(nn.Module):
    """Pytorch-UNet: upsampling, padding by the difference in size, concatenation, and a dice term in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True))
        self.up, self.outc = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inc(x)
        up = self.up(self.down(first))
        rows, columns = first.size(2) - up.size(2), first.size(3) - up.size(3)
        up = F.pad(up, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.outc(torch.cat([first, up], dim=1))


def unet() -> autoprec.Task:
    made = [(x, (x.mean(1) > 0).float()) for x, _ in images(size=15)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores, truth = model(batch[0]).squeeze(1), batch[1]
        shares = torch.sigmoid(scores)
        overlap = 2 * (shares * truth).sum((-1, -2)) / ((shares + truth).sum((-1, -2)) + 1e-6)
        return F.binary_cross_entropy_with_logits(scores, truth) + 1 - overlap.mean()

    return autoprec.Task(
        name="unet", model=Unet, train_batches=made, eval_batches=made[:2], loss=loss, optimizer=torch.optim.RMSprop,
        optimizer_settings={"lr": 1e-4, "momentum": 0.9, "foreach": True}, max_grad_norm=1.0,
    )  # fmt: skip


class Vit(nn.Module):
    """vit-pytorch: patches by reshaping, a class token, positions as a parameter, attention of plain products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, width)), nn.LayerNorm(width)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 17, width))
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 3 * width, bias=False), nn.Sequential(nn.Linear(width, width), nn.GELU())])
            for _ in range(2)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        n = len(image)
        patches = image.view(n, 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(n, 16, 48)
        x = torch.cat((self.cls.expand(n, -1, -1), self.embed(patches)), dim=1) + self.positions
        for to_qkv, feed_forward in self.layers:
            q, k, v = to_qkv(self.norm(x)).chunk(3, dim=-1)
            x = torch.einsum("bij,bjd->bid", torch.softmax(q @ k.mT * k.size(-1) ** -0.5, dim=-1), v) + x
            x = feed_forward(x) + x
        return self.head(x[:, 0])


def vit() -> autoprec.Task:
    made = images()
    return autoprec.Task(
        name="vit", model=Vit, train_batches=made, eval_batches=made[:2], optimizer_settings={"lr": 1e-3},
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
    )  # fmt: skip


class Diffusion(nn.Module):
    """denoising-diffusion-pytorch: the loss inside the forward, time steps through sinusoids, schedules as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(Sinusoidal(), nn.Linear(16, 16), nn.GELU())
        self.first, self.second, self.norm = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 3, 3, padding=1),
            nn.GroupNorm(4, 16),
        )
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", kept.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - kept).sqrt())

    def forward(self, image: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(image)
        scale, sigma = (
            each.gather(0, times.long())[:, None, None, None]
            for each in (self.sqrt_alphas_cumprod, self.sqrt_one_minus_alphas_cumprod)
        )
        hidden = self.norm(self.first(scale * image + sigma * noise)) + self.time_mlp(times)[:, :, None, None]
        return F.mse_loss(self.second(F.silu(hidden)), noise)


class Sinusoidal(nn.Module):
    def forward(self, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * torch.exp(torch.arange(8, device=times.device) * -(math.log(10_000) / 7))[None]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


def diffusion() -> autoprec.Task:
    made = [(x, torch.rand(8) * 999) for x, _ in images(size=8)]
    return autoprec.Task(
        name="diffusion", model=Diffusion, train_batches=made, eval_batches=made[:2],
        loss=lambda model, batch: model(*batch), optimizer=torch.optim.Adam, optimizer_settings={"lr": 1e-3},
    )  # fmt: skip


class Mamba(nn.Module):
    """mamba.py: a selective state space, scanned in a loop, with its matrix as a logarithm and a softplus step."""

    def __init__(self, width: int = 8, num_states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(1, 2 * width), nn.Linear(width, 1)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(width, 2 + 2 * num_states, bias=False), nn.Linear(2, width)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, num_states + 1).repeat(width, 1)))
        self.D = nn.Parameter(torch.ones(width))
        self.num_states = num_states

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2))
        delta, b, c = self.x_proj(x).split([2, self.num_states, self.num_states], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        decay = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.A_log.float()))
        given = (delta * x).unsqueeze(-1) * b.unsqueeze(2)
        state, states = torch.zeros_like(decay[:, 0]), []
        for step in range(x.size(1)):
            state = decay[:, step] * state + given[:, step]
            states.append(state)
        y = (torch.stack(states, dim=1) * c.unsqueeze(2)).sum(-1) + self.D * x
        return self.out_proj(y * F.silu(z))


def mamba() -> autoprec.Task:
    made = [(x, x.cumsum(1) / 4) for x in torch.randn(4, 8, 12, 1)]
    return autoprec.Task(
        name="mamba", model=Mamba, train_batches=made, eval_batches=made[:2], optimizer=with_decay,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    )  # fmt: skip


def ssdlite() -> autoprec.Task:
    """torchvision's SSDLite on lists of images and boxes: losses in training mode, detections in evaluation mode."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    def batch() -> Any:
        boxes = torch.tensor([[20.5, 30.25, 200.0, 250.0]])
        return [
            (torch.rand(3, 320, 320), {"boxes": boxes, "labels": torch.ones(1, dtype=torch.long)}) for _ in range(2)
        ]

    def loss(model: nn.Module, made: Any) -> torch.Tensor:
        found: torch.Tensor = sum(model([x for x, _ in made], [y for _, y in made]).values())
        return found

    def evaluate(model: nn.Module, made: Any) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([float(len(each["boxes"])) for each in model([x for x, _ in made])])
        return counts.mean(), counts.mean()

    made = [batch(), batch()]
    return autoprec.Task(
        name="ssdlite", train_batches=made, eval_batches=made[:1], loss=loss, evaluate=evaluate, num_samples=len,
        model=lambda: ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2),
        metric_name="detections", optimizer=torch.optim.SGD, optimizer_settings={"lr": 1e-3, "momentum": 0.9},
    )  # fmt: skip
