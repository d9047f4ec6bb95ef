"""Text at byte level: whole splits without overlap, shifted targets, padded passages, clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.errors import TaskError, UsageError
from autoprec.tasks.text import PADDING, language_batches, load_text, topic_batches


def write(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return f"text:{folder}"


class TestLanguage:
    def test_targets_are_the_inputs_one_byte_later(self) -> None:
        train, held_out = language_batches(length=32, batch_size=4)
        for batches in (train, held_out):
            inputs, targets = next(iter(batches()))
            assert (inputs.shape, targets.shape) == ((4, 32), (4, 32))
            assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])

    def test_held_out_windows_are_the_last_fifth_and_overlap_with_no_training_window(self, tmp_path: Path) -> None:
        data = write(tmp_path, a=bytes(range(100)))
        train, held_out = language_batches(data, length=8, batch_size=1)
        seen = torch.cat([torch.cat([x[0], y[0, -1:]]) for x, y in train()])
        left = [torch.cat([x[0], y[0, -1:]]) for x, y in held_out()]
        assert seen.max() == 76  # windows start at every fourth byte; the next would end at 80
        assert [window.tolist() for window in left] == [list(range(80, 89)), list(range(88, 97))]

    def test_an_epoch_follows_the_global_seed(self) -> None:
        train, held_out = language_batches(length=64, batch_size=64)

        def first(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return next(iter(train()))[0]

        assert torch.equal(first(1), first(1))
        assert not torch.equal(first(1), first(2))
        assert torch.equal(next(iter(held_out()))[0], next(iter(held_out()))[0])

    def test_one_file_is_a_text(self, tmp_path: Path) -> None:
        (tmp_path / "notes").write_bytes(b"\x00\xff" * 50)
        train, _ = language_batches(f"text:{tmp_path / 'notes'}", length=4, batch_size=1)
        assert next(iter(train()))[0].unique().tolist() == [0, 255]

    def test_hidden_files_of_a_folder_are_left_out(self, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "index").write_bytes(b"x" * 1000)
        assert list(load_text(write(tmp_path, a=b"hello")).documents) == ["a.txt"]

    def test_the_digest_stands_for_the_content_not_the_place(self, tmp_path: Path) -> None:
        folders = [tmp_path / name for name in ("one", "two", "three")]
        for folder in folders:
            folder.mkdir()
        same, again = (load_text(write(folder, a=b"hello")).digest for folder in folders[:2])
        assert same == again
        assert same != load_text(write(folders[2], a=b"hellO")).digest


class TestTopics:
    def test_the_longest_documents_are_the_classes_and_every_passage_is_in_its_document(self) -> None:
        train, held_out = topic_batches(num_topics=4, max_length=64, batch_size=16)
        longest = sorted(load_text().documents.values(), key=len, reverse=True)[:4]
        for batches in (train, held_out):
            batch = next(iter(batches()))
            for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["labels"], strict=True):
                assert bytes(tokens[mask].tolist()) in longest[label]
                assert (tokens[~mask] == PADDING).all()
        assert set(torch.cat([batch["labels"] for batch in held_out()]).tolist()) == {0, 1, 2, 3}

    def test_passages_are_whole_lines_and_a_long_line_is_cut(self, tmp_path: Path) -> None:
        lines = b"one\ntwo\n" + b"x" * 20 + b"\nend\n"
        train, _ = topic_batches(write(tmp_path, a=lines * 2, b=b"y\n" * 40), num_topics=2, max_length=8, batch_size=1)
        passages = {bytes(batch["tokens"][0].tolist()) for batch in train() if batch["labels"].item() == 1}
        assert passages <= {b"one\ntwo\n", b"x" * 8, b"end\none\n", b"two\n"}
        assert {b"one\ntwo\n", b"x" * 8} <= passages

    def test_shorter_passages_are_padded_to_the_longest_of_the_batch(self) -> None:
        train, _ = topic_batches(max_length=50, batch_size=32)
        batch = next(iter(train()))
        assert batch["tokens"].shape[1] == int(batch["mask"].sum(1).max()) <= 50
        assert (batch["mask"].sum(1) > 0).all()


@pytest.mark.parametrize(
    ("function", "settings", "error", "message"),
    [
        (language_batches, {"data": "topic"}, UsageError, "data 'topic'; allowed: topics, text:PATH; nearest: topics"),
        (language_batches, {"data": "topics:x"}, UsageError, "takes no path"),
        (language_batches, {"data": "text"}, UsageError, "needs a file or folder: text:PATH"),
        (language_batches, {"data": "text:/nowhere/here"}, TaskError, "there is no file or folder 'here'"),
        (language_batches, {"length": 0}, UsageError, "length is 0"),
        (language_batches, {"length": 500_000}, TaskError, "0 training and 0 held-out samples"),
        (language_batches, {"batch_size": 0}, UsageError, "batch_size is 0"),
        (language_batches, {"batch_size": 10**6}, TaskError, r"larger than the \d+ training samples"),
        (topic_batches, {"num_topics": 1}, UsageError, "num_topics is 1: 'topics' has 79 documents"),
        (topic_batches, {"num_topics": 80}, UsageError, "num_topics is 80"),
        (topic_batches, {"max_length": 0}, UsageError, "max_length is 0"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(
    function: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(**settings)


def test_an_empty_folder_is_an_error_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no bytes") as caught:
        language_batches(f"text:{tmp_path}")
    assert str(tmp_path.parent) not in str(caught.value)
