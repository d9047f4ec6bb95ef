"""Models by name from every family: what they are trained for, on what, and what a wrong name says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from autoprec.errors import TaskError, UsageError
from autoprec.tasks import Task
from autoprec.tasks.language import UNMASKED, masked_batches, next_token_batches
from autoprec.tasks.masks import IGNORED, load_masks, mask_batches
from autoprec.tasks.named import named_task
from autoprec.tasks.segmentation import AUXILIARY_WEIGHT, _loss, _overlap_of

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="the extra `timm` is not installed")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the extra `hf` is not installed"
)


def check_trains(task: Task) -> None:
    """The first batch has a loss and gradients, a held-out batch a metric, and another process builds the same."""
    torch.manual_seed(0)
    model = task.model()
    task.loss(model, next(iter(task.train_batches()))).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert task.evaluate is not None
    with torch.no_grad():
        loss, metric = task.evaluate(model.eval(), next(iter(task.eval_batches())))
    assert loss > 0
    assert 0 <= metric <= 1
    assert task.source is not None
    assert task.source.build().settings == task.settings


class TestSegmentation:
    def test_a_segmentation_model_is_trained_on_the_ink_of_digits(self) -> None:
        task = named_task("torchvision:lraspp_mobilenet_v3_large", image_size=32, batch_size=2, target_batch_size=3)
        images, masks = next(iter(task.train_batches()))
        assert (images.shape, masks.shape) == ((2, 3, 32, 32), (2, 32, 32))
        assert [len(mask.unique()) for mask in masks] == [2, 2]
        assert task.metric_name == "intersection over union"
        assert task.target is not None
        assert task.target.description == "3 x 3 x 224 x 224"
        check_trains(task)

    def test_ink_has_the_class_of_its_digit(self) -> None:
        data = load_masks("digits")
        images = data.train.images  # type: ignore[attr-defined]
        assert data.num_classes == 11
        _, masks = data.train.load([0, 1], size=8)
        assert torch.equal(masks[0] > 0, images.pixels[0, 0] > 8)
        assert masks.amax((1, 2)).tolist() == (images.labels[:2] + 1).tolist()

    def test_the_loss_counts_the_auxiliary_head_and_not_what_is_ignored(self) -> None:
        masks = torch.tensor([[[1, IGNORED]]])
        main, auxiliary = torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2)
        main[0, 0, 0, 1] = 100.0  # wrong, and ignored
        loss = _loss({"out": main, "aux": auxiliary}, masks)
        assert loss.item() == pytest.approx((1 + AUXILIARY_WEIGHT) * float(np.log(2)))

    def test_the_overlap_leaves_out_background_that_was_found_to_be_background(self) -> None:
        found = torch.tensor([[[0, 1, 2, 1]]])
        masks = torch.tensor([[[0, 1, 1, IGNORED]]])
        outputs = {"out": torch.nn.functional.one_hot(found, 3).permute(0, 3, 1, 2).float()}
        assert _overlap_of(outputs, masks).item() == 0.5

    def test_a_folder_of_masks_keeps_image_and_mask_together(self, tmp_path: Path) -> None:
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir()
        for number in range(5):
            grey = np.full((6, 8), number, np.uint8)
            Image.fromarray(grey).convert("RGB").save(tmp_path / "images" / f"{number}.png")
            Image.fromarray(grey).save(tmp_path / "masks" / f"{number}.png")
        data = load_masks(f"masks:{tmp_path}")
        assert (data.num_classes, len(data.train), len(data.held_out)) == (5, 4, 1)
        train, _ = mask_batches(data, image_size=4, batch_size=4)
        images, masks = next(iter(train()))
        brightness, classes = images[:, 0, 0, 0], masks[:, 0, 0]
        assert torch.equal(brightness.argsort(), classes.argsort())
        Image.fromarray(np.full((8, 6), 3, np.uint8)).save(tmp_path / "masks" / "3.png")
        message = "mask '3.png' has 6 x 8 pixels and its image '3.png' 8 x 6; one size is needed"
        with pytest.raises(TaskError, match=message):
            load_masks(f"masks:{tmp_path}")
        (tmp_path / "masks" / "3.png").unlink()
        with pytest.raises(TaskError, match="1 images have no mask of their name: 3"):
            load_masks(f"masks:{tmp_path}")


def test_batches_are_gone_through_without_a_call_and_are_contiguous() -> None:
    documents = [torch.arange(1000, dtype=torch.int32) % 200]
    train, held_out = next_token_batches(documents, data="numbers", length=20, batch_size=8)
    assert len(list(held_out)) == len(list(held_out())) == len(held_out)
    inputs, targets = next(iter(train))
    assert torch.equal(targets.view(-1), torch.cat(list(targets)))  # a view needs them in one piece
    assert torch.equal(inputs.view(-1), torch.cat(list(inputs)))
    assert torch.equal(targets[:, :-1], inputs[:, 1:])


def test_masked_tokens_are_the_targets_and_the_same_in_each_epoch() -> None:
    documents = [torch.arange(1000, dtype=torch.int32) % 200]
    train, held_out = masked_batches(documents, data="numbers", length=20, batch_size=50, mask_token=999)
    inputs, targets = next(iter(held_out()))
    hidden = inputs == 999
    assert torch.equal(targets != UNMASKED, hidden)
    assert torch.equal(torch.where(hidden, targets, inputs), documents[0][800:].view(10, 20).long())
    assert hidden.any(1).all()
    assert next(iter(train()))[0].eq(999).float().mean().item() == pytest.approx(0.15, abs=0.03)
    assert torch.equal(next(iter(held_out()))[0], inputs)


def test_a_name_with_and_without_its_prefix_is_one_study() -> None:
    assert named_task("torchvision:resnet18").settings == named_task("resnet18").settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "tim:test_vit"}, "'tim' is none of torchvision:, timm:, hf:; nearest: timm"),
        ({"model": "fcn_resnet5"}, "6 segmentation models.*nearest: fcn_resnet50"),
        ({"model": "fcn_resnet50", "data": "topics"}, r"allowed: digits, mnist, masks:PATH\); it goes with gpt-small"),
        ({"model": "resnet18", "data": "masks:here"}, "it goes with torchvision's segmentation models"),
    ],
    ids=["family", "name", "data", "masks"],
)
def test_a_wrong_name_says_what_there_is(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_task(**settings)


@pytest.mark.parametrize(("model", "package", "extra"), [("timm:a", "timm", "timm"), ("hf:b", "transformers", "hf")])
def test_a_missing_package_names_the_install_line(
    model: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TaskError, match=rf"needs {package}, .* pip install 'autoprec\[{extra}\]'"):
        named_task(model)


@needs_timm
class TestTimm:
    def test_a_model_is_trained_on_images_of_the_size_asked_for(self) -> None:
        task = named_task("timm:test_vit", batch_size=2, target_image_size=64, target_batch_size=2)
        assert task.name == "timm:test_vit"
        check_trains(task)
        assert task.target is not None
        assert task.target.model is not None
        assert task.target.model()(task.target.make_batch()[0]).shape == (2, 10)

    def test_an_unknown_name_gives_the_nearest(self) -> None:
        with pytest.raises(UsageError, match=r"not one of timm's .*nearest: test_vit"):
            named_task("timm:test_vitt")


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of transformers' own imports
class TestTransformers:
    @pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
    def test_an_architecture_is_trained_from_a_small_configuration(self, name: str) -> None:
        task = named_task(f"hf:{name}", batch_size=2)
        check_trains(task)
        assert sum(parameter.numel() for parameter in task.model().parameters()) < 2e6

    def test_a_causal_model_learns_the_next_byte_and_a_masked_one_the_hidden_ones(self) -> None:
        inputs, targets = next(iter(named_task("hf:gpt2", batch_size=2).eval_batches()))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        inputs, targets = next(iter(named_task("hf:bert", batch_size=2).eval_batches()))
        assert torch.equal(inputs == 256, targets != UNMASKED)
        target = named_task("hf:bert", target_batch_size=2).target
        assert target is not None
        assert target.make_batch()[0].shape == (2, 512)

    def test_a_folder_gives_its_weights_and_tokenizer_and_stays_private(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        folder = tmp_path / "mine"
        torch.manual_seed(1)
        model = named_task("hf:bert").model()
        model.save_pretrained(folder)
        words = {"[UNK]": 0, "[PAD]": 1, "[MASK]": 2, "the": 3, "of": 4}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]"
        ).save_pretrained(folder)
        task = named_task(f"hf:{folder}", batch_size=2)
        torch.manual_seed(2)
        loaded = task.model().state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
        inputs, _ = next(iter(task.train_batches()))
        assert inputs.max() <= 4
        assert (inputs == 2).any()
        assert task.name == "hf:mine"
        assert str(tmp_path) not in str(task.settings)

    def test_a_configuration_alone_starts_at_random(self, tmp_path: Path) -> None:
        from autoprec.tasks.transformers_models import small_configuration

        small_configuration("gpt2").save_pretrained(tmp_path / "mine")
        task = named_task(f"hf:{tmp_path / 'mine'}", batch_size=2)
        torch.manual_seed(0)
        first = task.model()
        assert type(first).__name__ == "GPT2LMHeadModel"
        check_trains(task)

    def test_code_in_a_folder_is_not_run(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(
            '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}'
        )
        (tmp_path / "own.py").write_text("raise SystemExit('this code ran')")
        with pytest.raises(TaskError, match=r"model 'hf:.* contains custom code"):
            named_task(f"hf:{tmp_path}")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model": "hf:berd"}, "nor a folder here; nearest: .*bert.*nothing is downloaded"),
            ({"model": "hf:org/name"}, "model 'hf:name': .*hf download NAME --local-dir FOLDER"),
            ({"model": "hf:bert", "image_size": 32}, "image_size is 32: hf:bert takes no images"),
            ({"model": "hf:bert", "data": "digits"}, "does not go with hf:bert .allowed: topics, text:PATH"),
            ({"model": "hf:bert", "weights": "/private/file.pt"}, "weights is 'file.pt': hf:FOLDER takes the weights"),
        ],
        ids=["name", "hub", "image size", "data", "weights"],
    )
    def test_what_does_not_go_together_is_said(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            named_task(**settings)
