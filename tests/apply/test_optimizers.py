"""The optimizer and the grad scaler of a policy, older checkpoints, and policies from elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy, apply_policy, build_grad_scaler, build_optimizer, remove_policy
from autoprec.apply import configure_optimizer, portability
from autoprec.errors import ApplyError, PrecisionWarning

POLICY = Policy(optimizer={"eps": 1e-6, "amsgrad": True})


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_groups_are_kept_and_the_policys_settings_are_applied() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "weight_decay": 0.25}]
    optimizer = build_optimizer(POLICY, torch.optim.AdamW, groups, lr=0.1)
    found = [(g["lr"], g["weight_decay"], g["eps"], g["amsgrad"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [(0.5, 0.01, 1e-6, True, 2), (0.1, 0.25, 1e-6, True, 2)]


def test_without_settings_the_optimizers_own_defaults_stay() -> None:
    optimizer = build_optimizer(Policy(), torch.optim.AdamW, nn.Linear(2, 2).parameters())
    assert (optimizer.param_groups[0]["eps"], optimizer.param_groups[0]["amsgrad"]) == (1e-8, False)


@pytest.mark.parametrize("where", ["settings", "group"])
def test_what_the_user_states_wins_with_a_warning(where: str) -> None:
    params: Any = nn.Linear(2, 2).parameters()
    settings = {"eps": 1e-3} if where == "settings" else {}
    params = [{"params": params, "eps": 1e-3}] if where == "group" else params
    with pytest.warns(PrecisionWarning, match=r"eps=0.001 was asked for; the policy says 1e-06"):
        optimizer = build_optimizer(POLICY, torch.optim.Adam, params, **settings)
    assert (optimizer.param_groups[0]["eps"], optimizer.param_groups[0]["amsgrad"]) == (1e-3, True)


def test_a_setting_that_the_class_lacks_is_left_out_and_told() -> None:
    with pytest.warns(PrecisionWarning, match="RMSprop has no amsgrad"):
        optimizer = build_optimizer(POLICY, torch.optim.RMSprop, nn.Linear(2, 2).parameters())
    assert optimizer.param_groups[0]["eps"] == 1e-6


def test_an_older_checkpoint_keeps_the_policys_settings_and_says_what_differed() -> None:
    model = nn.Linear(2, 2)
    old = stepped(torch.optim.AdamW(model.parameters(), lr=0.3), model).state_dict()
    optimizer = build_optimizer(POLICY, torch.optim.AdamW, model.parameters(), lr=0.1)
    with pytest.warns(PrecisionWarning, match=r"eps 1e-08 -> 1e-06, amsgrad False -> True"):
        optimizer.load_state_dict(old)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["amsgrad"]) == (0.3, 1e-6, True)
    stepped(optimizer, model)
    assert optimizer.state[model.weight]["step"] == 2


def test_a_checkpoint_of_the_same_settings_loads_in_silence() -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(build_optimizer(POLICY, torch.optim.AdamW, model.parameters()), model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_optimizer(POLICY, torch.optim.AdamW, model.parameters()).load_state_dict(optimizer.state_dict())
    assert caught == []


SCALED = Policy(grad_scaler={"init_scale": 256.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7})


def test_c29_a_scaler_is_on_only_where_the_policy_has_fp16() -> None:
    for policy, enabled in (
        (Policy(default="fp32"), False),
        (Policy(default="bf16"), False),
        (Policy(default="autocast", dtype="bf16"), False),
        (Policy(default="fp32", modules={"a": "fp16"}), True),
        (Policy(default="autocast"), True),
    ):
        scaler = build_grad_scaler(policy, device="cpu")
        assert scaler.is_enabled() is enabled
        assert scaler.scale(torch.ones(())).item() == (65536.0 if enabled else 1.0)


def test_the_scaler_has_the_policys_numbers() -> None:
    scaler = build_grad_scaler(SCALED, device="cpu")
    numbers = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    assert numbers == (256.0, 4.0, 0.25, 7)


def test_an_older_scaler_state_gives_its_scale_and_not_its_factors() -> None:
    old = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler = build_grad_scaler(SCALED, device="cpu")
    with pytest.warns(
        PrecisionWarning, match=r"growth_factor 2.0 -> 4.0, backoff_factor 0.5 -> 0.25, growth_interval 100 -> 7"
    ):
        scaler.load_state_dict(old.state_dict())
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 7)
    with pytest.warns(PrecisionWarning, match="switched off"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert scaler.get_scale() == 8.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is missing")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
def test_without_an_accelerator_the_scaler_is_for_the_cpu() -> None:
    """A CUDA build of torch names CUDA as its accelerator also where no device is there."""
    assert build_grad_scaler(POLICY)._device == "cpu"


def test_a_scaler_for_a_missing_device_is_an_error() -> None:
    with pytest.raises(ApplyError, match="no CUDA device is there"):
        build_grad_scaler(Policy(), device="cuda")


def test_a_policy_from_elsewhere_is_applied_with_a_list_of_what_changed() -> None:
    provenance = {"device_type": "cuda", "device_name": "A100", "versions": {"torch": "2.0.1"}}
    with pytest.warns(PrecisionWarning, match=r"device cuda -> cpu; torch 2\.0\.1 -> .*verify it here"):
        model = apply_policy(nn.Sequential(nn.Linear(2, 2)), Policy(provenance=provenance))
    remove_policy(model)
    here = {"device_type": "cpu", "versions": {"torch": torch.__version__}}
    apply_policy(model, Policy(provenance=here))


def test_c43_a_device_without_bf16_units_is_an_error_and_the_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portability, "has_native_bf16", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    model = nn.Sequential(nn.Linear(2, 2))
    for policy in (Policy(modules={"0": "bf16"}), Policy(dtype="bf16")):
        with pytest.raises(ApplyError, match=r"bf16 needs a GPU with BF16 units .*T4 has none"):
            apply_policy(model, policy)
    assert "forward" not in model[0].__dict__
    apply_policy(model, Policy(default="fp16"))


def test_other_shapes_warn_and_other_types_are_refused() -> None:
    from autoprec.apply import describe_model, read_structure

    policy = Policy(model=describe_model(read_structure(nn.Sequential(nn.Linear(2, 3))), "net"))
    model = nn.Sequential(nn.Linear(2, 5))
    with pytest.warns(PrecisionWarning, match=r"other shapes .*0 .*5"):
        apply_policy(model, policy)
    with pytest.raises(ApplyError, match="'0' is Conv1d, the policy was made for Linear"):
        apply_policy(nn.Sequential(nn.Conv1d(2, 2, 1)), policy)
    with pytest.raises(ApplyError, match=r"'1' \(Linear\) is not covered by the policy"):
        apply_policy(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), policy)
    with pytest.raises(ApplyError, match=r"'0' \(Linear\) is missing"):
        apply_policy(nn.ModuleDict({"a": nn.Linear(2, 3)}), policy)


def test_half_on_a_cpu_outside_the_emulation_warns_once() -> None:
    import threading

    model = apply_policy(nn.Sequential(nn.Linear(2, 2)), Policy(default="fp16"))
    caught: list[Any] = []

    def work() -> None:  # emulation holds for the thread that entered it
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(torch.ones(1, 2))
            model(torch.ones(1, 2))
            caught.extend(seen)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(w.message)[:35] for w in caught] == ["FP16 on a CPU is slow in torch; `wi"]
    assert caught[0].category is PrecisionWarning


@pytest.mark.parametrize("wrong", [None, {"default": "fp32"}, "policy.json"])
def test_only_a_policy_can_be_applied(wrong: Any) -> None:
    with pytest.raises(ApplyError, match=r"takes a Policy \(see load_policy\)"):
        apply_policy(nn.Linear(2, 2), wrong)


def test_only_a_module_can_take_one() -> None:
    with pytest.raises(ApplyError, match=r"takes an nn\.Module, found function"):
        apply_policy(lambda x: x, Policy())  # type: ignore[type-var]
    with pytest.raises(ApplyError, match="TorchScript"):
        apply_policy(scripted(), Policy())


def test_a_scripted_part_computes_in_its_parents_precision() -> None:
    model = nn.Sequential(nn.Linear(2, 2), scripted())
    with pytest.raises(
        ApplyError, match=r"'1' is TorchScript, whose weights cannot be cast .* allowed: fp32, autocast"
    ):
        apply_policy(model, Policy(default="fp16"))
    with pytest.raises(ApplyError, match="'1' is TorchScript and computes in its parent's region"):
        apply_policy(model, Policy(default="autocast", modules={"1": "fp32"}))
    apply_policy(model, Policy(default="autocast", modules={"0": "fp32"}))
    assert model(torch.ones(1, 2)).dtype == torch.float32


def scripted() -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


def test_an_optimizer_that_a_framework_built_gets_the_policys_settings_whatever_its_groups_say() -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW([{"params": model.parameters(), "eps": 1e-3}], lr=0.1), model)
    old = optimizer.state_dict()
    assert configure_optimizer(POLICY, optimizer) is optimizer
    group = optimizer.param_groups[0]
    assert (group["eps"], group["amsgrad"], group["lr"]) == (1e-6, True, 0.1)
    assert all("max_exp_avg_sq" in optimizer.state[parameter] for parameter in model.parameters())
    old["param_groups"][0]["amsgrad"] = False
    with pytest.warns(PrecisionWarning, match="amsgrad False -> True"):
        optimizer.load_state_dict(old)
    stepped(optimizer, model)


def test_a_built_optimizer_without_a_setting_is_told_once() -> None:
    with pytest.warns(PrecisionWarning, match=r"SGD has no eps or amsgrad: the policy's eps=1e-06, amsgrad=True is"):
        configure_optimizer(POLICY, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def adafactor_policy() -> Policy:
    return Policy(default="autocast", optimizer={"eps": 1e-6, "amsgrad": None})


def test_an_eps_that_is_no_float_keeps_the_class_s_own_with_a_warning() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    with pytest.warns(PrecisionWarning, match=r"eps of Adafactor is \(None, 0.001\) by default and of another kind"):
        built = build_optimizer(adafactor_policy(), torch.optim.Adafactor, parameters, lr=0.1)
    assert built.param_groups[0]["eps"] == (None, 0.001)
    parameters[0].grad = torch.ones(2, 2)
    built.step()
    with pytest.warns(PrecisionWarning, match="eps of Adafactor is"):
        configure_optimizer(adafactor_policy(), built)
    assert built.param_groups[0]["eps"] == (None, 0.001)
    built.step()
    assert bool((parameters[0] < 1).all())


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [(torch.optim.AdamW, 1e-6), (torch.optim.RMSprop, 1e-6), (torch.optim.Adagrad, 1e-6)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_eps_that_is_a_float_is_the_policy_s(optimizer: Any, expected: float) -> None:
    built = build_optimizer(adafactor_policy(), optimizer, [nn.Parameter(torch.ones(2))], lr=0.1)
    assert built.param_groups[0]["eps"] == expected
