"""Image files that somebody made to do harm: one line that names the file, and no wait."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from autoprec.errors import TaskError
from autoprec.tasks.images import load_images


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(path: Path, *, size: int = 8, text: int = 0, body: bytes | None = None) -> None:
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 9 * 8) if body is None else body
    more = _chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * text)) if text else b""
    chunks = [_chunk(b"IHDR", header), more, _chunk(b"IDAT", pixels), _chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "bomb": lambda path: _png(path, size=60_000),
    "oversized text": lambda path: _png(path, text=100 * 2**20),
    "pipe": _pipe,
    "cut": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 4) and None,
    "no image": lambda path: path.write_text("text") and None,
    "damaged pixels": lambda path: _png(path, body=b"\xff" * 40),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_image_is_one_line_that_names_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for number in range(6):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cats" / "0.png").unlink()
    make(tmp_path / "cats" / "0.png")
    images = load_images(f"imagefolder:{tmp_path}")
    with pytest.raises(TaskError, match=r"^image '0.png' cannot be read \(\w+\)$"):
        [split.load(range(len(split.labels)), size=8) for split in (images.train, images.held_out)]
