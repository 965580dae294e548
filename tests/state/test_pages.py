"""Rows in blocks: slots, rings, growth, copy-on-write; against a plain list of rows."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from larql_kv.state.ledger import Ledger
from larql_kv.state.pages import BLOCK, PagedRows, allocate_block
from larql_kv.state.tokens import TokenLog

WIDTH = 3


def _pages(ring: int | None) -> PagedRows:
    return PagedRows(lambda rows: torch.full((rows, WIDTH), float("nan")), ring)


def _write(pages: PagedRows, first: int, stop: int, salt: int = 0) -> None:
    skip = max(0, stop - first - pages.ring) if pages.ring is not None else 0
    pages.reserve(first + skip, stop)
    pages.write(_rows(first + skip, stop, salt), first + skip)


def _rows(first: int, stop: int, salt: int = 0) -> torch.Tensor:
    return (torch.arange(first, stop).float() + 1000 * salt)[:, None].expand(-1, WIDTH)


@pytest.mark.parametrize("ring", [None, 1, 8, 63, 64, 65, 150])
@given(chunks=st.lists(st.integers(1, 200), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_last_rows_are_there_and_no_more(ring: int | None, chunks: list[int]) -> None:
    pages, length = _pages(ring), 0
    for chunk in chunks:
        _write(pages, length, length + chunk)
        length += chunk
        start = 0 if ring is None else max(0, length - ring)
        assert torch.equal(pages.read(start, length), _rows(start, length))
        allocated = sum(pages.rows_of_block(index) for index in range(pages.block_count))
        wanted = length if ring is None else min(length, ring)
        assert wanted <= allocated < wanted + BLOCK
        assert ring is None or allocated <= ring
        addresses = [pages.block(index).data_ptr() for index in range(pages.block_count)]
        assert pages.table[: pages.block_count].tolist() == addresses


@pytest.mark.parametrize("ring", [None, 70])
def test_forks_share_until_one_side_writes(ring: int | None) -> None:
    parent = _pages(ring)
    _write(parent, 0, 130)
    child = parent.fork()
    both = Ledger(item for pages in (parent, child) for item in pages.entries("rows", "canonical", 130))
    alone = Ledger(parent.entries("rows", "canonical", 130))
    assert both.total(role="canonical", capacity=True) == alone.total(role="canonical", capacity=True)
    _write(child, 130, 140, salt=1)
    _write(parent, 130, 135, salt=2)
    start = 64 if ring is None else 140 - ring
    assert torch.equal(child.read(start, 140), torch.cat((_rows(start, 130), _rows(130, 140, 1))))
    assert torch.equal(parent.read(start, 135), torch.cat((_rows(start, 130), _rows(130, 135, 2))))


def test_a_dropped_fork_lets_its_blocks_go() -> None:
    parent = _pages(None)
    _write(parent, 0, 64)
    child = parent.fork()
    before = parent.block(0).data_ptr()
    del child
    gc.collect()
    _write(parent, 10, 12, salt=1)
    assert parent.block(0).data_ptr() == before, "nobody shares the block any more: no copy is due"


def test_a_copy_that_fails_leaves_the_block_shared() -> None:
    """Copy-on-write gives up its claim last: after a failure the other side still clones before it writes."""
    parent = _pages(None)
    _write(parent, 0, 64)
    child = parent.fork()
    make, parent._make_block = parent._make_block, lambda rows: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(MemoryError):
        parent.reserve(3, 4)
    parent._make_block = make
    _write(child, 3, 4, salt=9)
    assert torch.equal(parent.read(0, 64), _rows(0, 64))


def test_blocks_are_private_to_the_process_and_merge() -> None:
    def maps() -> int:
        return sum(1 for _ in Path("/proc/self/maps").open())

    before = maps()
    blocks = [allocate_block((2, 3, 64, 64), torch.bfloat16, torch.device("cpu")) for _ in range(500)]
    assert maps() - before < 100, "neighbouring blocks must not each cost one of the 65,530 mappings"
    blocks[0].zero_()
    child = os.fork()
    if child == 0:
        blocks[0].fill_(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert not blocks[0].any()


def test_growth_copies_nothing() -> None:
    pages = _pages(None)
    _write(pages, 0, 64)
    first = pages.block(0).data_ptr()
    for start in range(64, 64 * 30, 64):
        _write(pages, start, start + 64)
    assert pages.block(0).data_ptr() == first
    assert torch.equal(pages.read(0, 64 * 30), _rows(0, 64 * 30))
    pages.truncate(65)
    assert pages.block_count == 2
    pages.clear()
    assert pages.block_count == 0


def test_token_log() -> None:
    log = TokenLog()
    log.append(range(1000))
    assert log.to_list() == list(range(1000))
    assert log.since(990).tolist() == list(range(990, 1000))
    twin = log.fork()
    twin.truncate(5)
    twin.append([7])
    assert len(log) == 1000
    assert twin.to_list() == [0, 1, 2, 3, 4, 7]
    line = log.ledger_entry("canonical")
    assert line.live == 4000
    assert 4000 <= line.capacity <= 6000
