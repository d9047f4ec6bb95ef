"""Exports of a policy that need no framework: what each file says, and what is said to be lost."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from autoprec import Policy
from autoprec.cli import main
from autoprec.errors import UsageError
from autoprec.integrations.deepspeed_config import KEEPS_POLICY, deepspeed_config
from autoprec.integrations.launch_files import accelerate_config, lightning_config
from autoprec.policy import GradScalerSettings, ModelInfo, ModuleInfo, OptimizerSettings, Provenance, TrainingOptions

MODEL = ModelInfo(
    name="mine",
    fingerprint="0",
    modules={
        "stem": ModuleInfo(type="Conv2d", parameters={"weight": [8, 3, 3, 3]}),
        "norm": ModuleInfo(type="LayerNorm", parameters={"weight": [8]}),
        "head": ModuleInfo(type="Linear", parameters={"weight": [10, 80]}),
    },
)


def sections(policy: Policy, **settings: int) -> dict[str, object]:
    return dict(json.loads(deepspeed_config(policy, **settings).text))


def test_the_section_is_that_of_most_parameters_and_other_units_are_lost_by_name() -> None:
    policy = Policy(default="fp32", modules={"head": "autocast", "stem": "fp16"}, model=MODEL)
    exported = deepspeed_config(policy, zero_stage=2, micro_batch_size=16)
    assert json.loads(exported.text) == {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
    }
    assert exported.lost == (
        "fp16 of 1 units, which compute in autocast fp16: stem",
        "fp32 of 1 units, which compute in autocast fp16: norm",
    )


def test_the_numbers_of_a_grad_scaler_go_over_where_deepspeed_has_them() -> None:
    scaler = GradScalerSettings(init_scale=1000.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=300)
    exported = deepspeed_config(Policy(default="fp16", grad_scaler=scaler))
    assert json.loads(exported.text)["fp16"] == {
        "enabled": True,
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": 9,
        "loss_scale_window": 300,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }
    assert exported.lost[:3] == (
        "init_scale 1000: a power of two is needed, written as 512",
        "growth_factor 1.5: DeepSpeed's is 2",
        "backoff_factor 0.25: DeepSpeed's is 0.5",
    )
    autocast = deepspeed_config(Policy(default="autocast", grad_scaler=scaler))
    assert autocast.lost == (
        "the grad scaler's init_scale 1000, growth_factor 1.5, backoff_factor 0.25, growth_interval 300:"
        " DeepSpeed's autocast uses torch's own defaults",
    )
    assert sections(Policy(default="autocast"))["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    assert deepspeed_config(Policy(default="autocast")).lost == ()


def test_bf16_keeps_fp32_gradients_where_zero_can_and_says_how_to_keep_the_policy() -> None:
    policy = Policy(default="bf16", dtype="bf16", modules={"norm": "fp32"})
    assert sections(policy, zero_stage=1)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in sections(policy, zero_stage=0)
    assert KEEPS_POLICY in deepspeed_config(policy).notes
    assert deepspeed_config(policy, zero_stage=0).lost == (
        "fp32 of 1 units, which compute in bf16: norm",
        "FP32 gradients: without ZeRO DeepSpeed accumulates them in BF16",
    )


def test_what_stands_beside_the_precision_goes_over_or_is_lost_by_name() -> None:
    policy = Policy(
        default="fp32",
        optimizer=OptimizerSettings(eps=1e-6, amsgrad=True),
        training=TrainingOptions(
            accumulation_steps=4, checkpoint=("blocks.*",), channels_last=True, compile="inductor"
        ),
    )
    exported = deepspeed_config(policy)
    assert json.loads(exported.text)["gradient_accumulation_steps"] == 4
    options = (
        "training options checkpoint, channels_last: autoprec.apply.apply_training_options sets them",
        "compile: call torch.compile after the policy is applied",
    )
    optimizer = "optimizer settings eps=1e-06, amsgrad=True: build the optimizer with autoprec.build_optimizer"
    assert exported.lost == (optimizer, *options)
    lightning = lightning_config(policy, policy_file="it's.json")
    assert "        policy: 'it''s.json'\n  accumulate_grad_batches: 4\n" in lightning.text
    assert lightning.lost == options
    accelerate = accelerate_config(policy, policy_file="policy.json")
    assert "#   accelerator = PolicyAccelerator('policy.json', gradient_accumulation_steps=4)\n" in accelerate.text
    assert accelerate.lost == options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 4}, "ZeRO stage 4; allowed: 0, 1, 2, 3"),
        ({"micro_batch_size": 0}, "micro-batch size 0; at least 1"),
    ],
    ids=["stage", "batch"],
)
def test_a_wrong_setting_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        deepspeed_config(Policy(), **settings)


def test_without_the_extra_the_command_names_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Policy().save(tmp_path / "policy.json")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else find(name))
    monkeypatch.setattr("sys.argv", ["autoprec", "export", str(tmp_path / "policy.json"), "--to", "onnx"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "onnxscript is not installed; install it with: pip install 'autoprec[onnx]'" in capsys.readouterr().err


def test_the_command_writes_the_file_and_tells_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy(default="fp16", modules={"0": "fp32"})
    policy.save(tmp_path / "policy.json")
    place = tmp_path / "ds.json"
    arguments = ["--to", "deepspeed", "--zero-stage", "3", "--target-batch-size", "16", "-o", str(place)]
    monkeypatch.setattr("sys.argv", ["autoprec", "export", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    exported = deepspeed_config(policy, zero_stage=3, micro_batch_size=16)
    assert place.read_text() == exported.text
    printed = capsys.readouterr()
    assert printed.out == f"written: {place}\n"
    told = [*(f"lost: {each}" for each in exported.lost), *(f"note: {each}" for each in exported.notes)]
    assert printed.err.splitlines() == told
    assert told[0] == "lost: fp32 of 1 units, which compute in fp16: 0"


def test_accelerate_reads_its_file_and_has_no_precision_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    place = tmp_path / "launch.yaml"
    place.write_text(accelerate_config(Policy(default="fp16"), policy_file="policy.json").text)
    read = load_config_from_file(str(place))
    assert isinstance(read, ClusterConfig)
    assert (read.mixed_precision, str(read.distributed_type), read.num_processes) == ("no", "DistributedType.NO", 1)


def test_what_the_lightning_file_names_builds_a_trainer_under_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
    yaml = pytest.importorskip("yaml")
    policy = Policy(default="fp16", modules={"head": "fp32"}, training=TrainingOptions(accumulation_steps=2))
    policy.save(tmp_path / "policy.json")
    monkeypatch.chdir(tmp_path)
    settings = yaml.safe_load(lightning_config(policy, policy_file="policy.json").text)["trainer"]
    (plugin,) = settings.pop("plugins")
    module, _, name = plugin["class_path"].rpartition(".")
    built = getattr(importlib.import_module(module), name)(**plugin["init_args"])
    trainer = lightning.Trainer(
        plugins=built,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **settings,
    )
    assert trainer.precision_plugin.policy == policy
    assert trainer.accumulate_grad_batches == 2


def test_deepspeed_gets_the_batch_that_the_policy_was_found_for() -> None:
    found = Provenance(settings={"target_batch_size": 24})
    policy = Policy(default="bf16", provenance=found)
    assert sections(policy)["train_micro_batch_size_per_gpu"] == 24
    assert sections(policy, micro_batch_size=3)["train_micro_batch_size_per_gpu"] == 3
    assert sections(Policy(default="bf16"))["train_micro_batch_size_per_gpu"] == 1
