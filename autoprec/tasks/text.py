"""Text at byte level: language modelling and topic classification on CPython's documentation topics or on one's files.

Nothing is downloaded: the topics (79 documents, 465 kB of English) are part of CPython, as `pydoc_data.topics`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autoprec.errors import TaskError, UsageError, did_you_mean
from autoprec.tasks.epochs import EpochBatches, check_batch_size
from autoprec.tasks.language import next_token_batches, split_document

__all__ = ["NUM_BYTES", "PADDING", "TextData", "language_batches", "load_text", "topic_batches"]

NUM_BYTES = 256
"""Tokens of a byte-level model: the values of a byte."""
PADDING = 256
"""The token behind a passage that is shorter than the longest of its batch; a model that sees it has 257 tokens."""

TEXT_NAMES = ("topics", "text:PATH")
TopicBatch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TextData:
    """Documents by name, as bytes. `digest` stands for their content where a path would be private."""

    name: str
    documents: dict[str, bytes]
    digest: str

    def tokens(self) -> list[torch.Tensor]:
        """Return each document's bytes, 1-D uint8."""
        return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in self.documents.values() if text]


def load_text(data: str = "topics") -> TextData:
    """Load text by name: `topics`, or `text:PATH` for a file, or a folder's files, hidden ones left out.

    Raises:
        UsageError: an unknown name; no path where one belongs. TaskError: the file or folder is missing or empty.
    """
    name, colon, path = data.partition(":")
    if name not in ("topics", "text"):
        raise UsageError(f"data {name!r}; allowed: {', '.join(TEXT_NAMES)}{did_you_mean(name, ['topics', 'text'])}")
    if name == "topics" and colon:
        raise UsageError("data 'topics' comes with Python and takes no path")
    if name == "text" and not path:
        raise UsageError("data 'text' needs a file or folder: text:PATH")
    documents = _read_topics() if name == "topics" else _read_files(Path(path))
    digest = hashlib.sha256()
    for key, content in sorted(documents.items()):
        digest.update(f"{key}\0{len(content)}\0".encode())
        digest.update(content)
    return TextData(name, documents, digest.hexdigest()[:16])


def language_batches(
    data: str = "topics", *, length: int = 128, batch_size: int = 16
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of next-byte prediction: `Task(train_batches=..., eval_batches=...)`.

    A batch is (inputs, targets), both (n, length) int64 in 0 to 255; targets are the inputs one byte later. The last
    fifth of each document is held out. Training windows start at every half length, in an order drawn anew each epoch.

    Raises:
        UsageError, TaskError: as `load_text`; a text too short for one window in each split, or for one batch.
    """
    if length < 1:
        raise UsageError(f"length is {length}; at least 1")
    text = load_text(data)
    return next_token_batches(text.tokens(), data=text.name, length=length, batch_size=batch_size)


def topic_batches(
    data: str = "topics", *, num_topics: int = 8, max_length: int = 128, batch_size: int = 16
) -> tuple[EpochBatches, EpochBatches]:
    """Return training and held-out batches of the question which document a passage comes from.

    A batch is a dict of `tokens` (n, longest) int64, whole lines of up to `max_length` bytes with `PADDING` behind
    shorter ones, `mask` (n, longest) bool, True where there is a byte, and `labels` (n,) int64. The longest documents,
    `num_topics` of them, are the classes; the last fifth of each is held out.

    Raises:
        UsageError, TaskError: as `load_text`; fewer documents than topics, or fewer passages than one batch.
    """
    if max_length < 1:
        raise UsageError(f"max_length is {max_length}; at least 1")
    text = load_text(data)
    if not 2 <= num_topics <= len(text.documents):
        raise UsageError(f"num_topics is {num_topics}: {text.name!r} has {len(text.documents)} documents; at least 2")
    chosen = sorted(text.documents.values(), key=lambda content: (-len(content), content))[:num_topics]
    splits = []
    for part in (0, 1):
        passages = [_passages(split_document(content)[part], max_length) for content in chosen]
        labels = [label for label, found in enumerate(passages) for _ in found]
        splits.append(_Passages([passage for found in passages for passage in found], torch.tensor(labels)))
    train, held_out = splits
    check_batch_size(batch_size, data=text.name, num_train=len(train.labels), num_held_out=len(held_out.labels))
    return (
        EpochBatches(train, len(train.labels), batch_size, shuffle=True),
        EpochBatches(held_out, len(held_out.labels), batch_size, shuffle=False),
    )


def _read_topics() -> dict[str, bytes]:
    from pydoc_data.topics import topics

    return {name: content.encode() for name, content in topics.items()}


def _read_files(path: Path) -> dict[str, bytes]:
    if not path.exists():
        raise TaskError(f"data 'text': there is no file or folder {path.name!r}")
    files = sorted(file for file in path.rglob("*") if _is_shown(file, path)) if path.is_dir() else [path]
    try:
        documents = {file.relative_to(path).as_posix(): file.read_bytes() for file in files}
    except OSError as error:
        raise TaskError(f"data 'text': {path.name!r} cannot be read ({error.strerror})") from None
    if not any(documents.values()):
        raise TaskError(f"data 'text': {path.name!r} holds no bytes ({len(documents)} files)")
    return documents


def _is_shown(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _passages(content: bytes, max_length: int) -> list[bytes]:
    """Cut a text into runs of whole lines, up to `max_length` bytes; a longer line is a passage of its beginning."""
    passages: list[bytes] = []
    current = b""
    for line in content.splitlines(keepends=True):
        if current and len(current) + len(line) > max_length:
            passages.append(current)
            current = b""
        current += line[: max_length - len(current)]
    passages.append(current)
    return [passage for passage in passages if passage.strip()]


@dataclass(frozen=True, slots=True, eq=False)
class _Passages:
    passages: Sequence[bytes]
    labels: torch.Tensor

    def __call__(self, indices: torch.Tensor) -> TopicBatch:
        picked = [torch.tensor(list(self.passages[index])) for index in indices.tolist()]
        tokens = torch.nn.utils.rnn.pad_sequence(picked, batch_first=True, padding_value=PADDING)
        return {"tokens": tokens, "mask": tokens != PADDING, "labels": self.labels[indices]}
