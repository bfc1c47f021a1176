"""A file passes the check of its mark, however it was written; a changed byte fails."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fn.checkpoint.files import check_file, write_file
from accel_fn.errors import CheckpointError

BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


def check(folder, parts, place):
    content = b"".join(parts)
    with ThreadPoolExecutor(2) as pool:
        mark = write_file(folder / "parts", parts)
        assert write_file(folder / "whole", [content]) == mark
        assert (folder / "parts").read_bytes() == content
        check_file(folder / "parts", mark, pool)
        if content:
            with (folder / "parts").open("r+b") as file:
                file.seek(place % len(content))
                file.write(bytes([content[place % len(content)] ^ 1]))
            with pytest.raises(CheckpointError, match="is damaged: its content"):
                check_file(folder / "parts", mark, pool)


@given(parts=st.lists(st.binary(max_size=90), max_size=5), place=st.integers(0, 500))
def test_a_mark_is_of_all_bytes_and_of_nothing_else(tmp_path_factory, parts, place):
    check(tmp_path_factory.mktemp("files"), parts, place)


@pytest.mark.parametrize(
    ("sizes", "place"),
    [((BLOCK - 7, 20, 5), BLOCK + 17), ((9, BLOCK - 9), 0), ((BLOCK, 0, BLOCK), BLOCK)],
)
def test_a_mark_of_several_blocks_is_of_all_their_bytes(tmp_path, sizes, place):
    draw = random.Random(0)
    check(tmp_path, [draw.randbytes(size) for size in sizes], place)
