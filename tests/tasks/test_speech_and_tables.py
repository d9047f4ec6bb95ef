"""Speech features and tables: whole real splits, normalised by the training part, and clear errors."""

from __future__ import annotations

import sys

import pytest
import torch

from autoprec.errors import TaskError, UsageError
from autoprec.tasks import speech
from autoprec.tasks.speech import NUM_FEATURES, NUM_SPEAKERS, speech_batches
from autoprec.tasks.tabular import tabular_batches


class TestSpeech:
    def test_the_splits_are_the_datas_own(self) -> None:
        pytest.importorskip("aeon")
        train, held_out = speech_batches(batch_size=32)
        labels = [torch.cat([batch[2] for batch in batches()]) for batches in (train, held_out)]
        assert [len(found) for found in labels] == [270, 370]
        assert labels[0].bincount().tolist() == [30] * NUM_SPEAKERS
        assert labels[1].bincount().tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]

    def test_frames_are_padded_behind_their_length_and_normalised_by_the_training_split(self) -> None:
        pytest.importorskip("aeon")
        train, _ = speech_batches(batch_size=270)
        frames, lengths, _ = next(iter(train()))
        assert frames.shape == (270, 26, NUM_FEATURES)
        assert (lengths.min().item(), lengths.max().item()) == (7, 26)
        inside = torch.arange(26) < lengths[:, None]
        assert (frames[~inside] == 0).all()
        assert frames[inside].mean(0).abs().max() < 1e-4
        assert frames[inside].std(0).tolist() == pytest.approx([1.0] * NUM_FEATURES, abs=1e-3)

    def test_without_aeon_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "aeon", None)
        monkeypatch.setitem(sys.modules, "aeon.datasets", None)
        speech._load.cache_clear()
        with pytest.raises(TaskError, match=r"pip install 'autoprec\[speech\]'"):
            speech_batches()

    def test_an_unknown_name_gives_the_nearest(self) -> None:
        with pytest.raises(UsageError, match="allowed: japanese_vowels; nearest: japanese_vowels"):
            speech_batches("japanese_vowel")


class TestTables:
    def test_the_split_is_whole_fixed_by_the_seed_and_normalised_by_its_training_part(self) -> None:
        train, held_out = tabular_batches(batch_size=455)
        columns, labels = next(iter(train()))
        left = torch.cat([batch[1] for batch in held_out()])
        assert (columns.shape, len(left)) == ((455, 30), 114)
        assert (labels.sum() + left.sum()).item() == 357
        assert columns.mean(0).abs().max() < 1e-4
        assert columns.std(0).tolist() == pytest.approx([1.0] * 30, abs=1e-3)
        other = torch.cat([batch[1] for batch in tabular_batches(seed=1)[1]()])
        assert not torch.equal(left, other)

    def test_a_wrong_name_or_size_says_what_is_allowed(self) -> None:
        with pytest.raises(UsageError, match="allowed: breast_cancer; nearest: breast_cancer"):
            tabular_batches("breast_canser")
        with pytest.raises(TaskError, match="larger than the 455 training samples"):
            tabular_batches(batch_size=456)
