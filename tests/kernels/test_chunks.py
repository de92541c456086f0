"""How many masked rows the head processes at a time on a GPU."""

from __future__ import annotations

from electra_kernels.mlm_head import _without_small_rest
from hypothesis import given
from hypothesis import strategies as st


def test_the_masked_rows_of_electra_large_are_one_chunk() -> None:
    masked_rows_of_32_rows = 32 * 130

    assert _without_small_rest(masked_rows_of_32_rows, chunk=4096) == 4160


@given(num_rows=st.integers(1, 100_000), chunk=st.integers(1024, 4096))
def test_chunks_cover_all_rows_and_the_last_one_is_not_small(num_rows: int, chunk: int) -> None:
    size = _without_small_rest(num_rows, chunk)

    assert chunk <= size < 2 * chunk
    rows_of_last_chunk = num_rows % size or size
    has_one_chunk = num_rows <= size
    assert has_one_chunk or rows_of_last_chunk >= chunk // 8
