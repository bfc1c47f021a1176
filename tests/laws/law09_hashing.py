"""A file passes the check of its mark, whatever kind of memory it was written from; a changed byte
fails."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.checkpoint.format import hashing
from accel_fn.checkpoint.format.hashing import check_file, write_file
from accel_fn.errors import CheckpointError


@given(
    parts=st.lists(st.binary(max_size=90), max_size=5),
    block=st.sampled_from([8, 32, 64]),
    piece=st.sampled_from([4, 8]),
    place=st.integers(0, 10**6),
)
def test_a_mark_is_of_all_bytes_and_of_nothing_else(parts, block, piece, place):
    """Blocks are as small as the files of a test."""
    content = b"".join(parts)
    with (
        mock.patch.multiple(hashing, _BLOCK=block, _PIECE=piece),
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(2) as pool,
    ):
        mark = write_file(Path(folder) / "parts", parts)
        assert write_file(Path(folder) / "whole", [content]) == mark
        assert (Path(folder) / "parts").read_bytes() == content
        check_file(Path(folder) / "parts", mark, pool)
        if content:
            place %= len(content)
            changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            (Path(folder) / "parts").write_bytes(changed)
            with pytest.raises(CheckpointError, match="is damaged: its content"):
                check_file(Path(folder) / "parts", mark, pool)
