"""The packed linear: bits of the reference weight, the same bits for every shape of call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from larql_kv.backends.cpu import ops
from larql_kv.model.tensors import RawTensor
from tests.backends.quantised import ALL_KINDS, K_QUANTS, as_float32, make_raw

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 64, 129)


def inputs_of(kind: str) -> int:
    return 1024 if kind in K_QUANTS else 352 if kind[0] == "Q" else 77


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_packed_equals_dequantised_bit_for_bit(kind: str) -> None:
    raw = make_raw(kind, 150, inputs_of(kind))
    packed, plain = (ops.pack_linear([r], gemm_bf16=False) for r in (raw, as_float32(raw)))
    x = torch.randn(20, packed.in_features)
    assert torch.equal(packed(x), plain(x))
    unit = torch.eye(packed.in_features)  # every weight by itself
    assert torch.equal(packed(unit).T, torch.from_numpy(raw.dequantize()))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_close_to_float64(kind: str) -> None:
    raw = make_raw(kind, 130, inputs_of(kind), seed=1)
    packed = ops.pack_linear([raw], gemm_bf16=False)
    x = torch.randn(9, packed.in_features)
    exact = x.double() @ torch.from_numpy(raw.dequantize()).double().T
    magnitude = x.double().abs() @ torch.from_numpy(raw.dequantize()).double().abs().T
    assert ((packed(x) - exact).abs() <= magnitude * packed.in_features * 2.0**-24).all()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_row_keeps_its_bits_in_every_call(kind: str) -> None:
    packed = ops.pack_linear([make_raw(kind, 100, inputs_of(kind))], gemm_bf16=True)
    packed.bias = torch.randn(100)
    x = torch.randn(129, packed.in_features)
    expected = packed(x, invariant=True)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for n in ROWS:
            assert torch.equal(packed(x[:n].contiguous(), invariant=True), expected[:n]), (threads, n)
            assert torch.equal(packed(x[-n:].contiguous(), invariant=True), expected[-n:]), (threads, n)


def test_members_of_several_kinds_are_concatenated() -> None:
    raws = [
        make_raw(kind, n, 256, seed=n) for kind, n in (("Q4_0", 65), ("Q6_K", 30), ("Q6_K", 40), ("F32", 3))
    ]
    packed = ops.pack_linear(raws, gemm_bf16=True)
    assert (packed.in_features, packed.out_features) == (256, 138)
    assert len(packed.parts) == 3
    x = torch.randn(7, 256)
    single = torch.cat([ops.pack_linear([raw], gemm_bf16=False)(x) for raw in raws], dim=1)
    assert torch.equal(packed(x), single)
    packed.bias = bias = torch.randn(138)
    assert torch.equal(packed(x), single + bias)
    big = torch.randn(40, 256)
    weight = torch.cat([torch.from_numpy(raw.dequantize()) for raw in raws]).bfloat16()
    before = packed.resident_bytes
    packed.prepare_gemm()
    assert packed.resident_bytes == before + weight.nbytes
    expected = torch.nn.functional.linear(big.bfloat16(), weight).float() + bias
    assert torch.equal(packed(big), expected)


def test_bytes_are_those_of_the_format() -> None:
    for kind, bits in (
        ("Q8_0", 8.5),
        ("Q4_0", 4.5),
        ("Q4_1", 5),
        ("Q4_K", 4.625),
        ("Q6_K", 8.5625),
        ("F16", 16),
    ):
        packed = ops.pack_linear([make_raw(kind, 64, 512)], gemm_bf16=False)
        assert packed.nbytes == packed.resident_bytes == 64 * 512 * bits / 8, kind
        assert sum(t.nbytes for t in packed.tensors()) == packed.resident_bytes


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("scale", [1.0, 25.298221281347036])
def test_embedding_rows(kind: str, scale: float) -> None:
    raw = make_raw(kind, 40, inputs_of(kind))
    ids = torch.tensor([3, 39, 0, 3])
    expected = torch.from_numpy(raw.dequantize())[ids] * torch.tensor(scale, dtype=torch.float32)
    assert torch.equal(ops.EmbeddingTable(raw).rows(ids, scale), expected)


def test_other_kinds_are_held_as_float32() -> None:
    import gguf

    values = np.random.default_rng(0).standard_normal((70, 256)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.TQ1_0)
    raw = RawTensor("w", "TQ1_0", (70, 256), data)
    packed = ops.pack_linear([raw], gemm_bf16=False)
    assert torch.equal(packed(torch.eye(256)).T, torch.from_numpy(raw.dequantize()))
    ids = torch.tensor([5, 69])
    assert torch.equal(ops.EmbeddingTable(raw).rows(ids, 2.0), torch.from_numpy(raw.dequantize())[ids] * 2)


def test_wrong_arguments_are_refused() -> None:
    raw = make_raw("Q8_0", 64, 64)
    packed = ops.pack_linear([raw], gemm_bf16=False)
    for bad in (torch.randn(2, 63), torch.randn(64), torch.randn(2, 64).double(), torch.randn(64, 2).T):
        with pytest.raises(ValueError, match="contiguous float32"):
            packed(bad)
    with pytest.raises(ValueError, match="tensors of one linear"):
        ops.pack_linear([raw, make_raw("Q8_0", 64, 96)], gemm_bf16=False)
    with pytest.raises(ValueError, match="at least one"):
        ops.pack_linear([], gemm_bf16=False)
    with pytest.raises(ValueError, match="bytes for"):
        ops.pack_linear([RawTensor("w", "Q8_0", (64, 64), raw.data[:10])], gemm_bf16=False)
    with pytest.raises(ValueError, match="bias"):
        packed.bias = torch.zeros(3)
    with pytest.raises(ValueError, match="token ids"):
        ops.EmbeddingTable(raw).rows(torch.tensor([64]), 1.0)
    assert packed(torch.empty(0, 64)).shape == (0, 64)


def test_embedding_rows_from_two_threads_at_once() -> None:
    """The look-up runs without the GIL: no scratch may be shared between callers."""
    from concurrent.futures import ThreadPoolExecutor

    table = ops.EmbeddingTable(make_raw("Q4_K", 400, 256))
    ids = [torch.from_numpy(np.random.default_rng(seed).integers(0, 400, 64)) for seed in range(8)]
    expected = [table.rows(part) for part in ids]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(40):
            for got, want in zip(pool.map(table.rows, ids), expected, strict=True):
                assert torch.equal(got, want)
