"""Lightning's Trainer under a policy trains as autoprec's own loop does, also over a checkpoint."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

import lightning
from digits_training import (
    BF16,
    CLIP,
    COMPUTED,
    FP32_POLICY,
    LR,
    NUM_STEPS,
    POLICY,
    Network,
    assert_same_weights,
    loader,
    network,
    train_plainly,
    watching,
)
from lightning.pytorch.callbacks import ModelCheckpoint

import autoprec
from autoprec import Policy
from autoprec.apply import applied_policy
from autoprec.errors import ApplyError, PolicyError, PrecisionWarning, UsageError
from autoprec.integrations.lightning import PolicyPrecision
from autoprec.training import ScaleCollapsedError

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.* is deprecated:FutureWarning"
    ),  # torch and Lightning among themselves
    pytest.mark.filterwarnings("ignore:.*is emulated here:autoprec.errors.PrecisionWarning"),
]


class Digits(lightning.LightningModule):
    """As a user writes it: the network in `self.model`, Adam without any thought of precision."""

    def __init__(self, net: Network | None = None) -> None:
        super().__init__()
        self.model = net if net is not None else network()
        self.losses: list[float] = []
        self.is_watched = False
        self.computed: dict[str, set[torch.dtype]] = {}
        self.validated: list[dict[str, set[torch.dtype]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        with watching(self.model) if self.is_watched else nullcontext({}) as found:
            loss = F.cross_entropy(self.model(images), labels)
        self.computed = found
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with watching(self.model) as found:
            self.model(batch[0])
        self.validated.append(found)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LR)


def trainer(plugin: PolicyPrecision | None, folder: Path, **arguments: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "gradient_clip_val": CLIP,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    plugins = {} if plugin is None else {"plugins": plugin}
    return lightning.Trainer(**settings | plugins | arguments)


@pytest.mark.parametrize("policy", [POLICY, BF16, FP32_POLICY], ids=["fp16", "bf16", "fp32"])
def test_the_losses_and_weights_are_those_of_a_plain_loop(policy: Policy, tmp_path: Path) -> None:
    plain, expected = train_plainly(policy)
    module = Digits()
    plugin = PolicyPrecision(policy, module="model", emulates=True)
    trainer(plugin, tmp_path).fit(module, loader())
    assert len(module.losses) == NUM_STEPS
    assert module.losses == pytest.approx(expected, abs=1e-3)
    assert expected[-1] < 0.5 * expected[0]
    assert_same_weights(module.model, plain)


def test_accumulation_and_clipping_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    plain, expected = train_plainly(POLICY, num_steps=27, accumulation_steps=2)  # one epoch: 55 batches
    module = Digits()
    fit = trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=27, accumulate_grad_batches=2)
    fit.fit(module, loader())
    assert module.losses == pytest.approx(expected, abs=1e-3)
    assert_same_weights(module.model, plain)
    _, unclipped = train_plainly(POLICY, num_steps=27, accumulation_steps=2, clip=None)
    assert expected != pytest.approx(unclipped, abs=1e-3)


def test_each_unit_computes_in_the_policys_precision(tmp_path: Path) -> None:
    module = Digits()
    module.is_watched = True
    trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=1).fit(module, loader())
    assert module.computed == COMPUTED


def test_the_policys_scaler_and_optimizer_settings_are_used_and_the_model_is_bare_afterwards(tmp_path: Path) -> None:
    module = Digits()
    plugin = PolicyPrecision(POLICY, module="model")
    fit = trainer(plugin, tmp_path, max_steps=50)
    fit.fit(module, loader())
    group = fit.optimizers[0].param_groups[0]
    assert (group["eps"], group["amsgrad"]) == (1e-6, True)
    assert plugin.scaler is fit.scaler
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**16  # 2**14, doubled at 20 and 40 good steps
    assert applied_policy(module.model) is None
    fit.validate(module, loader(), verbose=False)
    assert plugin.state_dict()["grad_scaler"]["scale"] == 2.0**16


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_training_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_broken_off(tmp_path: Path) -> None:
    whole = Digits()
    middle = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=55, save_top_k=-1)
    plugin = PolicyPrecision(POLICY, module="model")
    trainer(plugin, tmp_path, enable_checkpointing=True, callbacks=middle).fit(whole, loader())
    path = tmp_path / "step=55.ckpt"
    saved = torch.load(path, weights_only=True)["PolicyPrecision"]["grad_scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2.0**16, 15)  # grew at 20 and 40, none skipped
    rest = Digits(network(seed=1))
    trainer(PolicyPrecision(POLICY, module="model"), tmp_path).fit(rest, loader(), ckpt_path=path)
    assert rest.losses == whole.losses[55:]
    assert_same_weights(rest.model, whole.model)


def test_a_checkpoint_of_another_policy_is_told(tmp_path: Path) -> None:
    first = trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=2)
    first.fit(Digits(), loader())
    first.save_checkpoint(tmp_path / "other.ckpt")
    other = trainer(PolicyPrecision(BF16, module="model"), tmp_path, max_steps=4)
    with pytest.warns(PrecisionWarning, match="trained under another policy"):
        other.fit(Digits(), loader(), ckpt_path=tmp_path / "other.ckpt")


@pytest.mark.parametrize("evaluation", ["policy", "fp32"])
def test_validation_is_under_the_policy_or_in_fp32(evaluation: Any, tmp_path: Path) -> None:
    module = Digits()
    plugin = PolicyPrecision(POLICY, module="model", evaluation=evaluation)
    fit = trainer(plugin, tmp_path, max_steps=4, limit_val_batches=1, val_check_interval=2)
    fit.fit(module, loader(), loader())
    fp32 = {name: {torch.float32} for name in COMPUTED}
    assert len(module.validated) >= 2
    assert all(found == (COMPUTED if evaluation == "policy" else fp32) for found in module.validated)
    fit.validate(module, loader(), verbose=False)
    assert applied_policy(module.model) is None


@pytest.mark.filterwarnings("default:.*is emulated here:autoprec.errors.PrecisionWarning")
def test_fp16_on_a_cpu_is_emulated_and_said_and_bf16_is_not(tmp_path: Path) -> None:
    with pytest.warns(PrecisionWarning, match=r"half precision \(BF16 and FP16\) on a CPU is emulated") as caught:
        trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=3).fit(Digits(), loader())
    assert len([each for each in caught if "emulated" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        trainer(PolicyPrecision(BF16, module="model"), tmp_path, max_steps=3).fit(Digits(), loader())


class Manual(Digits):
    """The same in manual optimization: clips by itself, before its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()


def test_manual_optimization_clips_unscaled_gradients(tmp_path: Path) -> None:
    plain, expected = train_plainly(POLICY, num_steps=40)
    module = Manual()
    fit = trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=40, gradient_clip_val=None)
    fit.fit(module, loader())
    assert module.losses == pytest.approx(expected, abs=1e-3)
    assert_same_weights(module.model, plain)


def test_a_policy_of_the_whole_lightning_module_names_its_parts(tmp_path: Path) -> None:
    policy = Policy(default="fp32", modules={f"model.{name}": precision for name, precision in POLICY.modules.items()})
    module = Digits()
    module.is_watched = True
    trainer(PolicyPrecision(policy), tmp_path, max_steps=2).fit(module, loader())
    assert module.computed == COMPUTED


def test_a_policy_that_was_applied_before_is_kept_and_another_is_refused(tmp_path: Path) -> None:
    module = Digits()
    autoprec.apply_policy(module.model, POLICY)
    trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=2).fit(module, loader())
    assert applied_policy(module.model) == POLICY
    with pytest.raises(ApplyError, match="two precision settings"):
        trainer(PolicyPrecision(BF16, module="model"), tmp_path, max_steps=2).fit(module, loader())


def test_a_second_precision_setting_of_the_trainer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Received both `precision=16-mixed` and `plugins="):
        trainer(PolicyPrecision(POLICY, module="model"), tmp_path, precision="16-mixed")


def test_autocast_around_the_training_is_an_error(tmp_path: Path) -> None:
    fit = trainer(PolicyPrecision(POLICY, module="model"), tmp_path, max_steps=2)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ApplyError, match="a second precision setting"):
        fit.fit(Digits(), loader())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "none.json"}, PolicyError, "none.json: cannot be read"),
        ({"policy": POLICY, "evaluation": "fp16"}, UsageError, "allowed: policy, fp32; nearest: fp32"),
    ],
    ids=["no such file", "no such evaluation"],
)
def test_a_wrong_argument_is_one_clear_error(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PolicyPrecision(**arguments)


@pytest.mark.parametrize(
    ("module", "message"),
    [("modle", "no submodule 'modle'; nearest: model"), ("", "rules match no module .* nearest: model.stem")],
    ids=["misspelt", "names of another root"],
)
def test_a_policy_that_does_not_fit_is_refused_and_the_model_stays_bare(
    module: str, message: str, tmp_path: Path
) -> None:
    digits = Digits()
    with pytest.raises(ApplyError, match=message):
        trainer(PolicyPrecision(POLICY, module=module), tmp_path).fit(digits, loader())
    assert applied_policy(digits.model) is None


def test_a_strategy_with_a_precision_of_its_own_is_refused() -> None:
    from autoprec.integrations.lightning import _check_strategy

    with pytest.raises(ApplyError, match="does not go with ModelParallelStrategy"):
        _check_strategy(lightning.pytorch.strategies.ModelParallelStrategy())


def test_a_scale_that_runs_to_zero_ends_the_training(tmp_path: Path) -> None:
    module = Digits()
    with torch.no_grad():
        module.model.stem.weight.mul_(1e9)
    with pytest.raises(ScaleCollapsedError, match="loss scale collapsed at step"):
        trainer(PolicyPrecision(POLICY, module="model"), tmp_path).fit(module, loader())


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_without_a_loss_are_left_out(tmp_path: Path) -> None:
    class Gaps(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    plugin = PolicyPrecision(POLICY, module="model")
    module = Gaps()
    trainer(plugin, tmp_path, max_steps=10, gradient_clip_val=None).fit(module, loader())
    assert plugin.scaler is not None
    assert plugin.scaler.num_updates == 5
