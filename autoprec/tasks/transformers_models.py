"""Models of transformers by architecture or folder; the package is imported here alone, when such a model is asked for.

Nothing is downloaded, no code of a folder is run (`trust_remote_code` stays False).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.language import UNMASKED, LanguageBatch, masked_batches, next_token_batches
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.tasks.settings import NamedSettings, check_data, missing_extra, optimizer_of
from autoprec.tasks.source import TaskSource, with_source
from autoprec.tasks.text import TEXT_NAMES, load_text
from autoprec.tasks.transformers_settings import BYTE_TOKENS, MASK_TOKEN, OF_TYPE, SMALL, TOKEN_SETTINGS

__all__ = ["KINDS", "Kind", "architectures", "small_configuration", "transformers_task"]

LENGTH, TARGET_LENGTH = 128, 512
"""Tokens of a sample in the trials, and in the real run where the model has that many positions."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What a model is trained for: transformers' automatic class, and its table of architectures."""

    auto_class: str
    table: str


KINDS: dict[str, Kind] = {
    "image classification": Kind("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "masked language modelling": Kind("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal language modelling": Kind("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}
"""By what a model is trained for; an architecture with several takes the first."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as its name leads to it; `folder` is None where the name is an architecture."""

    name: str
    architecture: str
    kind: str
    folder: str | None

    def configuration(self, **settings: Any) -> Any:
        """Return a fresh configuration, changed where `settings` name something that it has."""
        if self.folder is None:
            configuration = small_configuration(self.architecture)
        else:
            configuration = _read_configuration(self.folder)
        for name, value in settings.items():
            if hasattr(configuration, name):
                setattr(configuration, name, value)
        return configuration

    def build(self, configuration: Any) -> nn.Module:
        """Build the model: with the folder's weights where it has some, else with random ones, in FP32."""
        transformers = _import(self.name)
        configuration.use_cache = False
        configuration.architectures = configuration.architectures or []  # None is refused where several classes fit
        auto = getattr(transformers, KINDS[self.kind].auto_class)
        safe = {"trust_remote_code": False, "dtype": torch.float32}
        if self.folder is None or not _weight_files(self.folder):
            network: nn.Module = auto.from_config(configuration, **safe)
            return network
        try:
            loaded: nn.Module = auto.from_pretrained(
                self.folder, config=configuration, local_files_only=True, ignore_mismatched_sizes=True, **safe
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise TaskError(f"model {self.name!r}: the weights cannot be loaded: {_first_line(error)}") from error
        return loaded


def transformers_task(model: str, settings: NamedSettings, source: TaskSource) -> Task:
    """Describe the training of `hf:ARCHITECTURE`, small and with random weights, or of the model in `hf:FOLDER`.

    Images are classified; text is modelled, masked or causal, by the folder's own tokenizer or by its bytes.

    Raises:
        UsageError: an architecture that transformers does not have, with the nearest; data or a setting that does not
            go with it. TaskError: transformers is not installed; the folder, data or configuration do not fit.
    """
    found = _find(model, settings)
    settings = dataclasses.replace(settings, model=found.name)
    if settings.weights is not None:
        raise UsageError(
            f"weights is {Path(settings.weights).name!r}: hf:FOLDER takes the weights that lie in the folder, and an"
            " architecture starts at random; leave it out"
        )
    if found.kind == "image classification":
        return _image_task(found, settings, source)
    return _text_task(found, settings, source)


@lru_cache(maxsize=1)
def architectures() -> dict[str, tuple[str, ...]]:
    """Return what each of transformers' architectures can be trained for here, the first choice first."""
    from transformers.models.auto import modeling_auto

    tables = {kind: getattr(modeling_auto, about.table) for kind, about in KINDS.items()}
    names = dict.fromkeys(name for table in tables.values() for name in table)
    return {name: tuple(kind for kind, table in tables.items() if name in table) for name in names}


def small_configuration(architecture: str) -> Any:
    """Return a small configuration of an architecture by its name."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[architecture]
    known = {field.name: getattr(kind, field.name, None) for field in dataclasses.fields(kind)}
    wanted = {**TOKEN_SETTINGS, **SMALL, **OF_TYPE.get(architecture, {})}
    chosen = {name: _fitted(value, known[name]) for name, value in wanted.items() if name in known}
    return kind(**chosen)


def _fitted(value: Any, default: Any) -> Any:
    """Return a setting in the form that its default has."""
    if isinstance(default, list | tuple) and not isinstance(value, list | tuple):
        return type(default)(min(value, entry) if isinstance(entry, int) else entry for entry in default)
    return value


def _find(model: str, settings: NamedSettings) -> _Model:
    _import(settings.model)
    known = architectures()
    if model in known:
        return _Model(f"hf:{model}", model, known[model][0], None)
    folder = Path(model)
    if not folder.is_dir():
        raise UsageError(
            f"model 'hf:{folder.name}': neither one of the {len(known)} architectures of transformers for images and"
            f" text, nor a folder here{did_you_mean(model, known)}; nothing is downloaded: fetch a model into a folder"
            " first (hf download NAME --local-dir FOLDER)"
        )
    name = f"hf:{folder.resolve().name}"
    configuration = _read_configuration(str(folder))
    architecture = configuration.model_type
    kinds = known.get(architecture, ())
    if not kinds:
        raise TaskError(f"model {name!r}: {architecture!r} is trained on neither images nor text here; write a task")
    return _Model(name, architecture, _kind_of(configuration, kinds), str(folder))


def _kind_of(configuration: Any, kinds: Sequence[str]) -> str:
    """Return what the model was saved for, where its configuration says so; else the first choice."""
    from transformers.models.auto import modeling_auto

    saved = set(configuration.architectures or ())
    for kind in kinds:
        classes = getattr(modeling_auto, KINDS[kind].table)[configuration.model_type]
        if saved & set([classes] if isinstance(classes, str) else classes):
            return kind
    return kinds[0]


def _read_configuration(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise TaskError(f"model 'hf:{Path(folder).name}': {_first_line(error, folder)}") from None


def _first_line(error: Exception, folder: str = "") -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.replace(folder, Path(folder).name) if folder else text


def _weight_files(folder: str) -> list[Path]:
    return sorted(file for ending in ("*.safetensors", "*.bin") for file in Path(folder).glob(ending))


def _about(found: _Model) -> dict[str, Any]:
    """Return what tells models apart in a study: the version, and hashes where a path would be private."""
    about = {"transformers": _import(found.name).__version__, "trained_for": found.kind}
    if found.folder is None:
        return about
    configuration = _read_configuration(found.folder).to_dict()
    digest = hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode())
    for path in _weight_files(found.folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return about | {"model_digest": digest.hexdigest()[:16]}


def _image_task(found: _Model, settings: NamedSettings, source: TaskSource) -> Task:
    from autoprec.tasks.vision import classification_task

    if found.folder is not None:
        settings = settings.filled(image_size=getattr(found.configuration(), "image_size", None))
    return classification_task(
        settings, model=found.name, build=partial(_build_for_images, found), source=source, about=_about(found)
    )


def _build_for_images(found: _Model, *, num_classes: int, image_size: int, weights: None) -> nn.Module:
    settings: dict[str, Any] = {"num_labels": num_classes}
    return found.build(found.configuration(**settings, image_size=image_size))


def _text_task(found: _Model, settings: NamedSettings, source: TaskSource) -> Task:
    settings.refuse("image_size", "target_image_size", why="takes no images")
    check_data(settings.model, settings.data, TEXT_NAMES)
    settings = settings.filled(data="topics", batch_size=32)
    chosen, chosen_settings = optimizer_of(settings.optimizer, settings.lr)
    assert settings.data is not None
    assert settings.batch_size is not None
    text = load_text(settings.data)
    documents, mask_token = _tokens(found, text.documents)
    make = partial(_batches, found.kind, documents, text.name, mask_token, settings.batch_size)
    target_length = min(TARGET_LENGTH, _num_positions(found.configuration()))
    train, held_out = make(min(LENGTH, target_length))
    target, _ = make(target_length)
    task = Task(
        name=found.name,
        model=partial(_build_for_text, found),
        train_batches=train,
        eval_batches=held_out,
        loss=_loss,
        evaluate=_evaluate,
        optimizer=chosen,
        optimizer_settings=chosen_settings,
        max_grad_norm=MAX_GRAD_NORM,
        num_tokens=_count_tokens,
        target=TargetShape(
            make_batch=partial(target.first, settings.target_batch_size),
            batch_size=settings.target_batch_size,
            description=f"{settings.target_batch_size} x {target_length} tokens",
        ),
        settings=settings.identity() | _about(found) | {"data": text.name, "data_digest": text.digest},
    )
    return with_source(task, source)


def _build_for_text(found: _Model) -> nn.Module:
    causal = {"is_decoder": True} if found.kind == "causal language modelling" else {}
    return found.build(found.configuration(**causal))


def _batches(
    kind: str, documents: Sequence[torch.Tensor], data: str, mask_token: int | None, batch_size: int, length: int
) -> Any:
    if kind == "causal language modelling":
        return next_token_batches(documents, data=data, length=length, batch_size=batch_size)
    assert mask_token is not None
    return masked_batches(documents, data=data, length=length, batch_size=batch_size, mask_token=mask_token)


def _num_positions(configuration: Any) -> int:
    """Return how many tokens the model takes; RoBERTa and its kin keep two positions for themselves."""
    positions = getattr(configuration, "max_position_embeddings", None)
    return int(positions) - 2 if isinstance(positions, int) and positions > 2 else TARGET_LENGTH


def _tokens(found: _Model, documents: Mapping[str, bytes]) -> tuple[list[torch.Tensor], int | None]:
    """Return each document as tokens, by the folder's tokenizer or as bytes, and the mask's token."""
    tokenizer = _tokenizer(found)
    if tokenizer is not None:
        encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
        texts = [content.decode("utf-8", "replace") for content in documents.values() if content]
        if found.kind == "masked language modelling" and tokenizer.mask_token_id is None:
            raise TaskError(f"model {found.name!r}: its tokenizer has no mask token")
        return [torch.tensor(encode(text), dtype=torch.int32) for text in texts], tokenizer.mask_token_id
    size = found.configuration().vocab_size
    if size < BYTE_TOKENS - 7:
        raise TaskError(f"model {found.name!r}: {size} tokens and no tokenizer; bytes and a mask are {BYTE_TOKENS - 7}")
    byte_tokens = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in documents.values() if content]
    return byte_tokens, MASK_TOKEN


def _tokenizer(found: _Model) -> Any:
    if found.folder is None or not list(Path(found.folder).glob("tokenizer*")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(found.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise TaskError(f"model {found.name!r}: the tokenizer cannot be loaded: {_first_line(error)}") from error


def _loss(model: nn.Module, batch: LanguageBatch) -> torch.Tensor:
    inputs, targets = batch
    return _cross_entropy(model(input_ids=inputs).logits, targets)


def _evaluate(model: nn.Module, batch: LanguageBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross entropy and the share of right tokens, among the masked ones where some are."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    counted = targets != UNMASKED
    right = (logits.argmax(-1) == targets) & counted
    return _cross_entropy(logits, targets), right.sum() / counted.sum()


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNMASKED)


def _count_tokens(batch: LanguageBatch) -> int:
    return batch[0].numel()


def _import(model: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise missing_extra(model, "transformers", "hf") from None
    return transformers
