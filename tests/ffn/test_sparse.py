"""The gather kernels against float64, for every stored format, odd sizes and ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from larql_kv.backends.cpu.linear import pack_linear
from larql_kv.backends.cpu.sparse import SparseLayer, StoredRows, first_outputs
from larql_kv.backends.cpu.unpack import KIND_CODES
from larql_kv.model.shape_blocks import random_blocks
from larql_kv.model.tensors import RawTensor

PLAIN = ("F32", "BF16", "F16")


def raw(kind: str, rows: int, columns: int, seed: int) -> RawTensor:
    random = np.random.Generator(np.random.SFC64(seed))
    return RawTensor(f"{kind}{seed}", kind, (rows, columns), random_blocks(kind, rows, columns, 0.1, random))


def activate(g: np.ndarray, name: str) -> np.ndarray:
    if name == "silu":
        return g / (1 + np.exp(-g))
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


def strongest(scores: np.ndarray, count: int) -> np.ndarray:
    """Brute force: ids of the largest |score|, of equals the lower id, ascending."""
    return np.sort(np.lexsort((np.arange(len(scores)), -np.abs(scores)))[:count])


CASES = [(kind, 256, 160, "silu") for kind in KIND_CODES] + [(kind, 72, 101, "gelu_tanh") for kind in PLAIN]


@pytest.mark.parametrize(("kind", "hidden", "features", "activation"), CASES)
def test_walks_as_the_formula_says(kind, hidden, features, activation):
    raws = [raw(kind, features, hidden, seed) for seed in (1, 2, 3)]
    gate, up, down = (item.dequantize().astype(np.float64) for item in raws)
    layer = SparseLayer(
        pack_linear(raws[:1], gemm_bf16=False), StoredRows.of(raws[1]), StoredRows.of(raws[2]), activation
    )
    x = 2 * torch.randn(5, hidden)
    scores = layer.scores(x)
    for count in (1, 3, 17, 100, features):
        together = layer.walk_rows(x, scores, count)
        for i in range(len(x)):
            chosen = layer.score_and_select(x[i : i + 1], count)
            np.testing.assert_array_equal(chosen.ids, strongest(scores[i].numpy(), count))
            np.testing.assert_array_equal(chosen.gates, scores[i].numpy()[chosen.ids])
            row = x[i].double().numpy()
            g, u = gate @ row, up @ row
            a = activate(g, activation) * u
            a[np.abs(a) <= 1e-10] = 0
            expected = a[chosen.ids] @ down[chosen.ids]
            given = layer.walk(x[i : i + 1], chosen.ids, chosen.gates)
            size = np.abs(a[chosen.ids]) @ np.abs(down[chosen.ids]).max(1) + 1e-9
            assert np.abs(given[0].numpy() - expected).max() < 1e-4 * size
            assert torch.equal(given[0], together[i])  # rows together give the bits of each alone


def test_the_selection_is_exact_with_ties_and_signs():
    layer = _small()
    scores = torch.zeros(100)
    scores[[7, 3, 90, 50]] = torch.tensor([2.0, -2.0, 2.0, -5.0])
    for count in (1, 2, 3, 4, 5, 60, 100):
        chosen = layer.select(scores, count)
        np.testing.assert_array_equal(chosen.ids, strongest(scores.numpy(), count))
        bits = np.unpackbits(np.frombuffer(chosen.bitmap, np.uint8), bitorder="little")
        np.testing.assert_array_equal(bits.nonzero()[0], chosen.ids)
    for value in (0, 101):
        with pytest.raises(ValueError, match="features of 100"):
            layer.select(scores, value)


def test_the_bitmap_stands_for_the_set_alone():
    layer = _small()
    one, two = torch.rand(100), torch.rand(100)
    two[:40], one[:40] = 5 + torch.rand(40), 5 - torch.rand(40)
    first, second = layer.select(one, 40), layer.select(two, 40)
    assert first.bitmap == second.bitmap  # other scores in another order
    assert not np.array_equal(first.gates, second.gates)
    assert layer.select(two, 39).bitmap != second.bitmap


@pytest.mark.parametrize("seed", range(6))
def test_selections_of_random_sizes(seed):
    random = np.random.default_rng(seed)
    features = int(random.integers(1, 3000))
    values = random.integers(-4, 5, features) if seed % 2 else random.standard_normal(features)
    scores = torch.from_numpy(values.astype(np.float32))
    layer = _small(features)
    for count in {1, features, int(random.integers(1, features + 1))}:
        ids = layer.select(scores, count).ids
        np.testing.assert_array_equal(ids, strongest(scores.numpy(), count))


def test_negligible_contributions_are_left_out():
    layer = _small(up_scale=1e-11)
    x = torch.randn(1, 64)
    chosen = layer.score_and_select(x, 100)
    assert torch.equal(layer.walk(x, chosen.ids, chosen.gates), torch.zeros(1, 64))


def test_biases():
    raws = [raw("F32", 100, 64, seed) for seed in (1, 2, 3)]
    biases = [torch.randn(100), torch.randn(100), torch.randn(64)]
    gate = pack_linear(raws[:1], gemm_bf16=False)
    gate.bias = biases[0]
    layer = SparseLayer(gate, StoredRows.of(raws[1]), StoredRows.of(raws[2]), "silu", *biases[1:])
    x = torch.randn(3, 64)
    g, u, d = (torch.from_numpy(item.dequantize().copy()).double() for item in raws)
    scores = x.double() @ g.T + biases[0]
    a = torch.nn.functional.silu(scores) * (x.double() @ u.T + biases[1])
    expected = a @ d + biases[2]
    assert torch.allclose(layer.walk_rows(x, layer.scores(x), 100).double(), expected, atol=1e-5)
    nothing = np.empty(0, np.uint32)
    only_bias = layer.walk(x[:1], nothing, np.empty(0, np.float32))
    assert torch.equal(only_bias[0], biases[2])


def test_threads_do_not_change_bits():
    layer = _small()
    x = torch.randn(1, 64)
    chosen = layer.score_and_select(x, 90)
    alone = layer.walk(x, chosen.ids, chosen.gates)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(layer.walk(x, chosen.ids, chosen.gates), alone)
    finally:
        torch.set_num_threads(threads)


def test_first_outputs_share_memory():
    raws = [raw("Q8_0", 96, 64, 1), raw("F32", 96, 64, 2)]
    for both in (raws, [raws[0], raw("Q8_0", 96, 64, 3)]):
        linear = pack_linear(both, gemm_bf16=False)
        linear.bias = torch.randn(192)
        first = first_outputs(linear, 96)
        x = torch.randn(2, 64)
        assert torch.equal(first(x), linear(x)[:, :96])
        assert first.parts[0].data.data_ptr() == linear.parts[0].data.data_ptr()


def test_rows_that_cannot_be():
    item = raw("Q8_0", 4, 64, 1)
    with pytest.raises(ValueError, match="Q8_0"):
        StoredRows.of(RawTensor("x", "Q8_0", (5, 64), item.data))
    strided = RawTensor("x", "F32", (4, 8), np.ones((4, 8), np.float32))
    assert torch.equal(StoredRows.of(strided).values(np.array([1, 3])), torch.ones(2, 8))


def test_a_kind_without_kernels_is_held_as_float32():
    import gguf

    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType.TQ1_0)
    rows = StoredRows.of(RawTensor("x", "TQ1_0", (8, 256), data))
    assert rows.kind == "F32"
    assert rows.row_bytes == 1024


def _small(features: int = 100, up_scale: float = 1.0) -> SparseLayer:
    gate, up, down = (raw("F32", features, 64, seed) for seed in (1, 2, 3))
    scaled = (up.dequantize() * np.float32(up_scale)).view(np.uint8)
    up = RawTensor("up", "F32", up.shape, scaled)
    packed = pack_linear([gate], gemm_bf16=False)
    return SparseLayer(packed, StoredRows.of(up), StoredRows.of(down), "silu")
