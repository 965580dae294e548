"""Attention: right against float64, and the same bits wherever the rows lie and however the calls were
cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from larql_kv.backends.cpu import attention, ops


class Store:
    """Blocks of one layer; garbage (NaN) where no row was written."""

    def __init__(self, kv_heads: int, hd: int, rows: int, ring: int = 0, bf16: bool = False) -> None:
        slots = ring or rows
        dtype = torch.bfloat16 if bf16 else torch.float32
        sizes = [64] * (slots // 64) + ([slots % 64] if slots % 64 and ring else [])
        if not ring and slots % 64:
            sizes.append(64)
        self.blocks = [torch.full((2, kv_heads, size, hd), math.nan, dtype=dtype) for size in sizes]
        table = torch.tensor([b.data_ptr() for b in self.blocks], dtype=torch.int64)
        self.view = ops.KvStore(table, ring, bf16)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    window: int | None,
    scale: float,
    cap: float | None,
    start: int,
) -> Tensor:
    """float64 attention of rows first.. over all keys k, v (T, kv_heads, hd)."""
    n, heads, hd = q.shape
    group = heads // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.double(), k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(first, first + n)[:, None]
    key = torch.arange(k.shape[0])[None]
    seen = (key <= position) & (key >= start)
    if window is not None:
        seen &= key > position - window
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), v).reshape(n, heads * hd)


def run(
    q: Tensor, k: Tensor, v: Tensor, cuts: list[int], *, window: int | None = None, ring: int = 0, bf16:
    bool = False,
    cap: float | None = None, start: int = 0, scale: float = 0.2,
) -> Tensor:  # fmt: skip
    """Feed all rows in calls of the given sizes through a fresh store."""
    total, kv_heads, hd = k.shape
    store = Store(kv_heads, hd, total, ring, bf16)
    outs, first = [], 0
    for n in cuts:
        part = slice(first, first + n)
        args = (k[part].contiguous(), v[part].contiguous())
        outs.append(
            ops.attend(q[part].contiguous(), *args, store.view, first, window, scale, cap, min(start, first))
        )
        ops.append_rows(*args, store.view, first, max(0, n - ring) if ring else 0)
        first += n
    assert first == total
    return torch.cat(outs)


def random_qkv(
    total: int, heads: int, kv_heads: int, hd: int, bf16: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(total, h, hd) for h in (heads, kv_heads, kv_heads))
    return (q, ops.round_bf16_(k), ops.round_bf16_(v)) if bf16 else (q, k, v)


def cut(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hd"),
    [
        (9, 3, 64),
        (4, 1, 256),
        (2, 2, 8),
        (4, 2, 16),
        (8, 1, 32),
        (3, 1, 80),
        (2, 1, 250),
        (5, 5, 2),
        (6, 2, 128),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_cut_gives_the_same_bits_and_is_right(heads: int, kv_heads: int, hd: int, bf16: bool) -> None:
    total = 203
    q, k, v = random_qkv(total, heads, kv_heads, hd, bf16)
    for window, cap in ((None, None), (37, None), (64, 5.0)):
        whole = run(q, k, v, [total], window=window, cap=cap, bf16=bf16)
        exact = reference(q, k, v, 0, window, 0.2, cap, 0)
        assert (whole - exact).abs().max() < 3e-6
        for size in (1, 3, 5, 64, 100):
            again = run(q, k, v, cut(total, size), window=window, cap=cap, bf16=bf16)
            assert torch.equal(again, whole), (window, cap, size)
    torch.set_num_threads(2)
    q, k, v = random_qkv(total, heads, kv_heads, hd, bf16)
    whole = run(q, k, v, [total], bf16=bf16)
    assert torch.equal(run(q, k, v, [199, 1, 3], bf16=bf16), whole)
    torch.set_num_threads(1)
    assert torch.equal(run(q, k, v, [199, 1, 3], bf16=bf16), whole)


@pytest.mark.parametrize("window", [1, 5, 16, 63, 64, 65, 70, 128])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_ring_equals_a_full_store_under_the_mask(window: int, bf16: bool) -> None:
    for total in (max(1, window - 1), window, window + 1, 2 * window + 3):
        q, k, v = random_qkv(total, 6, 2, 32, bf16)
        full = run(q, k, v, [total], window=window, bf16=bf16)
        for size in (1, 2, 7, 50):
            for ring in (window, window + 3):
                again = run(q, k, v, cut(total, size), window=window, ring=ring, bf16=bf16)
                assert torch.equal(again, full), (total, size, ring)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "hd"), [(9, 3, 64), (4, 1, 256), (5, 1, 24), (2, 2, 16)])
def test_short_contexts_by_either_kernel(
    heads: int, kv_heads: int, hd: int, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = random_qkv(150, heads, kv_heads, hd, bf16)
    for window in (None, 40):
        whole = run(q, k, v, [150], window=window, bf16=bf16)
        for work in (0, 10**9):  # always, then never the kernel that spreads keys over threads
            monkeypatch.setattr(attention, "_SERIAL_WORK", work)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                again = run(q, k, v, [1] * 5 + [100] + [4, 1] * 9, window=window, ring=window or 0, bf16=bf16)
                assert torch.equal(again, whole), (window, work, threads)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "hd"), [(9, 3, 64), (4, 1, 256), (5, 1, 24), (30, 1, 2)])
def test_one_row_at_a_time_by_the_short_way(heads: int, kv_heads: int, hd: int, bf16: bool) -> None:
    total = 300
    q, k, v = random_qkv(total, heads, kv_heads, hd, bf16)
    for window, ring, cap in ((None, 0, None), (40, 40, 5.0), (200, 0, None)):
        whole = run(q, k, v, [total], window=window, cap=cap, bf16=bf16)
        store = Store(kv_heads, hd, total, ring, bf16)
        row = ops.RowAttention(heads, kv_heads, hd, 0.2, cap)
        for p in range(total):
            torch.set_num_threads(1 + p % 2)
            args = (k[p : p + 1], v[p : p + 1], store.view)
            out = row.attend(q[p : p + 1], *args, p, window)
            assert torch.equal(out, whole[p : p + 1]), (window, p)
            row.append(*args, p)
    with pytest.raises(ValueError, match="do not fit"):
        row.append(*args, 64 * len(store.blocks))
    with pytest.raises(ValueError, match="do not fit"):
        row.attend(q[:1], *args, 64 * len(store.blocks) + 1, None)
    with pytest.raises(ValueError, match="does not fit a ring"):
        row.attend(q[:1], k[:1], v[:1], Store(kv_heads, hd, 0, 40, bf16).view, 50, 42)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    hd=st.sampled_from([2, 8, 16, 24, 48, 64]),
    window=st.none() | st.integers(1, 150),
    bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_cuts_any_shape(
    cuts: list[int], kv_heads: int, group: int, hd: int, window: int | None, bf16: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    total = sum(cuts)
    q, k, v = random_qkv(total, kv_heads * group, kv_heads, hd, bf16)
    whole = run(q, k, v, [total], window=window, bf16=bf16)
    assert (whole - reference(q, k, v, 0, window, 0.2, None, 0)).abs().max() < 3e-6
    assert torch.equal(run(q, k, v, cuts, window=window, bf16=bf16, ring=window or 0), whole)


@pytest.mark.parametrize("n", [1, 4, 9])
def test_past_start_hides_earlier_rows(n: int) -> None:
    total, first, start = 150, 141, 77
    q, k, v = random_qkv(total, 4, 2, 16)
    store = Store(2, 16, total)
    ops.append_rows(
        k[start:first].contiguous(), v[start:first].contiguous(), store.view, start
    )  # the rest is NaN
    part = slice(first, first + n)
    args = (q[part].contiguous(), k[part].contiguous(), v[part].contiguous(), store.view, first)
    for window in (None, 20):
        out = ops.attend(*args, window, 0.3, None, past_start=start)
        exact = reference(q[part], k[: first + n], v[: first + n], first, window, 0.3, None, start)
        assert (out - exact).abs().max() < 3e-6


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random_qkv(90, 2, 1, 16)
    out = run(q * 1e3, k * 1e2, v, [30, 60])
    exact = reference(q * 1e3, k * 1e2, v, 0, None, 0.2, None, 0)
    assert torch.isfinite(out).all()
    assert (out - exact).abs().max() < 0.05  # scores of 1e5 carry an error of 1e-2 in float32


def test_append_rounds_to_the_store_and_skips() -> None:
    k, v = torch.randn(70, 2, 10), torch.randn(70, 2, 10)
    store = Store(2, 10, 70, bf16=True)
    ops.append_rows(k, v, store.view, 0, skip=3)
    assert torch.isnan(store.blocks[0][:, :, :3]).all()
    both = torch.stack([k, v]).transpose(1, 2).bfloat16()  # (2, heads, rows, hd)
    assert torch.equal(store.blocks[0][:, :, 3:], both[:, :, 3:64])
    assert torch.equal(store.blocks[1][:, :, :6], both[:, :, 64:])
    assert torch.isnan(store.blocks[1][:, :, 6:]).all()


def test_wrong_arguments_are_refused() -> None:
    q, k, v = random_qkv(3, 4, 2, 16)
    store = Store(2, 16, 64)
    for args, text in (
        ((q[:2], k, v, store.view, 0, None), "fit together"),
        ((q, k.double(), v, store.view, 0, None), "k_new"),
        ((q, k, v[:2], store.view, 0, None), "differ"),
        ((q, k, v, store.view, 65, None), "do not fit"),
        ((q, k, v, store.view, 0, 0), "window"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.attend(*args, 1.0)
    with pytest.raises(ValueError, match="ring of"):
        ops.attend(q, k, v, Store(2, 16, 0, ring=8).view, 50, 20, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        ops.append_rows(k, v, store.view, 62)
    with pytest.raises(ValueError, match="int64"):
        ops.KvStore(torch.zeros(2))


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("window", "sinks"), [(40, 4), (7, 20), (1, 1), (40, 70)])
def test_sinks_stay_where_a_window_cuts(window: int, sinks: int, cap: float | None) -> None:
    """Against float64; and the same bits from one call, single rows, a ring and a masked full store."""
    total, kv_heads, hd = 230, 2, 32
    q, k, v = random_qkv(total, 4, kv_heads, hd)
    group_k, group_v = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.double(), group_k) * 0.2
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    position, key = torch.arange(total)[:, None], torch.arange(total)[None]
    seen = (key <= position) & ((key > position - window) | (key < sinks))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    exact = torch.einsum("hnt,thd->nhd", weights, group_v).reshape(total, -1)

    def fed(cuts: list[int], ring: int) -> Tensor:
        store = Store(kv_heads, hd, total, ring)
        kept = Store(kv_heads, hd, sinks)
        store.view.set_sinks(sinks, torch.tensor([b.data_ptr() for b in kept.blocks]))
        outs, first = [], 0
        for n in cuts:
            part = slice(first, first + n)
            new = (k[part].contiguous(), v[part].contiguous())
            outs.append(
                ops.attend(q[part].contiguous(), *new, store.view, first, window, 0.2, cap, sinks=sinks)
            )
            sunk = max(0, min(sinks - first, n))
            if sunk:
                ops.append_rows(new[0][:sunk], new[1][:sunk], store.view, first)
            skip = max(sunk, n - ring) if ring else sunk
            ops.append_rows(*new, store.view, first, skip)
            first += n
        return torch.cat(outs)

    whole = fed([total], 0)
    assert (whole - exact).abs().max() < 3e-6
    assert torch.equal(fed([total], window), whole)
    for cuts in ([1] * total, [sinks, total - sinks], [100, 1, 1, 128]):
        assert torch.equal(fed(cuts, window), whole), cuts
        assert torch.equal(fed(cuts, 0), whole), cuts


def test_wrong_stores_are_refused() -> None:
    q, k, v = random_qkv(3, 4, 2, 16)
    table = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="ring must be"):
        ops.KvStore(table, -1)
    with pytest.raises(ValueError, match="do not fit"):
        ops.KvStore(table).set_sinks(65, table)
    with pytest.raises(ValueError, match="the store keeps"):
        ops.attend(q, k, v, Store(2, 16, 0, ring=8).view, 20, 8, 1.0, sinks=4)
    store = Store(2, 16, 64)
    store.view.set_coded(1)
    with pytest.raises(ValueError, match="q_codes"):
        ops.attend(q, k, v, store.view, 1, None, 1.0, q_codes=q[:2])
