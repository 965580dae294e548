"""Prefill on a CUDA card at the shapes of Gemma 3 4B: attention by choice of tiles, row kernels, products.

python benchmarks/micro/cuda_prefill.py                 # everything, about a minute
python benchmarks/micro/cuda_prefill.py attention       # of attention, rows, products

Every result is checked before it is timed. Times are medians over replays of a CUDA graph whose calls use
different buffers, so that nothing is found in the L2 cache by accident.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence

import torch
from triton.runtime.errors import OutOfResources

from larql_kv.backends.cuda import rowops
from larql_kv.backends.cuda.attention_prefill import TILES, attend

N, HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM = 4096, 2560, 10240, 8, 4, 256
EPS, SCALE = 1e-6, 1 / 16
COPIES = 4  # buffers a call rotates over: together more than the 60 MB of L2
MATRICES = {  # name: (outputs, inputs)
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
}
Call = Callable[[int], object]


def seconds(call: Call) -> float:
    """Median time of one call(index), index going round 0..COPIES-1."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(COPIES):
            call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(COPIES):
            call(index)
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / COPIES)
    return statistics.median(times[3:])


def line(name: str, taken: float, amount: float, unit: str, error: float) -> None:
    """amount: operations or bytes; unit: TFLOP/s or TB/s."""
    print(
        f"{name:<58} {1e6 * taken:9.1f} us  {amount / taken / 1e12:7.2f} {unit:<8} error {error:.1e}",
        flush=True,
    )


def error_of(actual: torch.Tensor, expected: torch.Tensor, name: str, most: float) -> float:
    """Norm-wise relative error; stops the run when it is above `most`."""
    expected = expected.double()
    error = float((actual.double() - expected).norm() / expected.norm())
    if not error <= most:
        raise SystemExit(f"{name}: error {error:.2e} is above {most:.0e}")
    return error


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int) -> torch.Tensor:
    """float64 attention of q (n, heads, D) over all rows k, v (first + n, kv_heads, D), head by head."""
    at = first + torch.arange(len(q), device="cuda")[:, None]
    key = torch.arange(len(k), device="cuda")[None, :]
    hidden = (key > at) | (key <= at - (window or 1 << 30))
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().T * SCALE
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        heads.append(weights @ v[:, head // group].double())
    return torch.cat(heads, 1)


def time_attention(n: int, first: int, window: int, sdpa: bool) -> None:
    """Every choice of tiles: n new rows after `first` held ones, in a ring where there is a window."""
    seen = sum(min(first + i + 1, window or 1 << 30) for i in range(n))
    operations = 4.0 * seen * HEADS * HEAD_DIM
    what = f"attention n {n} after {first}, window {window or 'none'}"
    q = [random(n, HEADS, HEAD_DIM) for _ in range(COPIES)]
    k, v = ([random(first + n, KV_HEADS, HEAD_DIM) for _ in range(COPIES)] for _ in range(2))
    ring = window
    slots = min(first, ring) if ring else first
    blocks = [
        torch.empty(
            2, KV_HEADS, min(64, ring - at) if ring else 64, HEAD_DIM, device="cuda", dtype=q[0].dtype
        )
        for _ in range(COPIES)
        for at in range(0, slots, 64)
    ]
    each = len(blocks) // COPIES
    addresses = torch.tensor([block.data_ptr() for block in blocks] + [0], dtype=torch.int64, device="cuda")
    tables = [addresses[i * each : (i + 1) * each + 1] for i in range(COPIES)]
    new = [(k[i][first:].contiguous(), v[i][first:].contiguous()) for i in range(COPIES)]
    for i in range(COPIES if first else 0):
        rowops.append_rows(k[i][:first], v[i][:first], tables[i], ring, 0, 0)
    expected = reference(q[0], k[0], v[0], first, window)
    for tiles in TILES[HEAD_DIM]:
        name = f"{what}, tiles {'/'.join(map(str, tiles))}"

        def call(i: int, tiles=tiles) -> torch.Tensor:
            return attend(q[i], *new[i], tables[i], ring, first, window, SCALE, tiles=tiles)

        try:
            error = error_of(call(0), expected, name, 5e-3)
        except OutOfResources as reason:
            print(f"{name}: {reason}")
            continue
        line(name, seconds(call), operations, "TFLOP/s", error)
    if sdpa:
        batched = [[x.transpose(0, 1)[None].contiguous() for x in (q[i], *new[i])] for i in range(COPIES)]

        def torch_call(i: int) -> torch.Tensor:
            queries, keys, values = batched[i]
            return torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=SCALE, enable_gqa=True
            )

        error = error_of(torch_call(0)[0].transpose(0, 1).flatten(1), expected, "torch", 1e-2)
        line(f"{what}, torch", seconds(torch_call), operations, "TFLOP/s", error)


def attention() -> None:
    time_attention(N, 0, 0, sdpa=True)
    time_attention(N, 0, 1024, sdpa=False)
    time_attention(N, N, 1024, sdpa=False)
    time_attention(512, 8192, 0, sdpa=False)
    time_attention(16, 8192, 0, sdpa=False)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def time_row_kernel(name: str, call: Call, result: torch.Tensor, expected: torch.Tensor, moved: int) -> None:
    error = error_of(result, expected, name, 3e-3)
    line(name, seconds(call), moved, "TB/s", error)


def rows() -> None:
    float32 = torch.float32
    x = [random(N, HIDDEN, dtype=float32) for _ in range(COPIES)]
    weight = random(HIDDEN, dtype=float32)
    for dtype in (torch.bfloat16, float32):
        time_row_kernel(
            f"rms_norm to {str(dtype)[6:]}",
            lambda i, dtype=dtype: rowops.rms_norm(x[i], weight, EPS, dtype),
            rowops.rms_norm(x[0], weight, EPS, dtype),
            normed(x[0], weight),
            N * HIDDEN * (4 + dtype.itemsize),
        )
    for dtype in (torch.bfloat16, float32):
        update = [random(N, HIDDEN, dtype=dtype) for _ in range(COPIES)]
        for factor in (None, weight):
            added = x[0].clone()
            rowops.add_normed_(added, update[0], factor, EPS)
            time_row_kernel(
                f"add_normed_ of {str(dtype)[6:]}{'' if factor is None else ', with a norm'}",
                lambda i, update=update, factor=factor: rowops.add_normed_(x[i], update[i], factor, EPS),
                added - x[0],
                normed(update[0], factor),
                N * HIDDEN * (8 + dtype.itemsize),
            )
            x[0].normal_()
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    angles = 10 * random(N, HEAD_DIM // 2, dtype=float32)
    cos, sin, norm = angles.cos(), angles.sin(), random(HEAD_DIM, dtype=float32)
    for dtype in (torch.bfloat16, float32):
        qkv = [random(N, width, dtype=dtype) for _ in range(COPIES)]

        def rope(i: int, qkv=qkv) -> tuple[torch.Tensor, ...]:
            return rowops.rope_qkv(qkv[i], None, cos, sin, norm, norm, EPS, HEADS, KV_HEADS, HEAD_DIM)

        heads = qkv[0].view(N, -1, HEAD_DIM)
        first, second = normed(heads[:, :-KV_HEADS], norm).chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        turned = torch.cat((first * c - second * s, second * c + first * s), -1)
        time_row_kernel(
            f"rope_qkv of {str(dtype)[6:]}",
            rope,
            torch.cat(rope(0), 1),
            torch.cat((turned, heads[:, -KV_HEADS:].double()), 1),
            N * (width * (dtype.itemsize + 2) + 4 * HEAD_DIM),
        )
    for dtype in (torch.bfloat16, float32):
        gate_up = [random(N, 2 * INTER, dtype=dtype) for _ in range(COPIES)]
        gate, up = gate_up[0].double().chunk(2, 1)
        time_row_kernel(
            f"gated_act of {str(dtype)[6:]}",
            lambda i, gate_up=gate_up: rowops.gated_act(gate_up[i], "gelu_tanh"),
            rowops.gated_act(gate_up[0], "gelu_tanh"),
            torch.nn.functional.gelu(gate, approximate="tanh") * up,
            N * INTER * (2 * dtype.itemsize + 2),
        )
    stores()


def stores() -> None:
    """Rows into and out of blocks."""
    blocks = random(COPIES, N // 64, 2, KV_HEADS, 64, HEAD_DIM)
    table = torch.tensor([[block.data_ptr() for block in copy] for copy in blocks], device="cuda")
    k, v = (random(N, KV_HEADS, HEAD_DIM) for _ in range(2))
    rowops.append_rows(k, v, table[0], 0, 0, 0)
    time_row_kernel(
        "append_rows",
        lambda i: rowops.append_rows(k, v, table[i], 0, 0, 0),
        blocks[0].permute(1, 0, 3, 2, 4).reshape(2, N, KV_HEADS, HEAD_DIM),
        torch.stack((k, v)),
        8 * N * KV_HEADS * HEAD_DIM,
    )
    blocks = random(COPIES, N // 64, 64, HIDDEN)
    table = torch.tensor([[block.data_ptr() for block in copy] for copy in blocks], device="cuda")
    x = [random(N, HIDDEN, dtype=torch.float32) for _ in range(COPIES)]
    rowops.write_rows(x[0], table[0], 0, 0, 0)
    time_row_kernel(
        "write_rows",
        lambda i: rowops.write_rows(x[i], table[i], 0, 0, 0),
        blocks[0].view(N, HIDDEN),
        x[0],
        6 * N * HIDDEN,
    )
    time_row_kernel(
        "read_rows",
        lambda i: rowops.read_rows(table[i], 0, 0, N, HIDDEN),
        rowops.read_rows(table[0], 0, 0, N, HIDDEN),
        x[0],
        6 * N * HIDDEN,
    )


def products() -> None:
    for name, (outputs, inputs) in MATRICES.items():
        x = [random(N, inputs) for _ in range(COPIES)]
        weights = [random(outputs, inputs) for _ in range(COPIES)]
        expected = x[0][:64].double() @ weights[0].double().T
        for dtype in (torch.float32, torch.bfloat16):

            def call(i: int, x=x, weights=weights, dtype=dtype) -> torch.Tensor:
                if dtype is torch.bfloat16:
                    return torch.mm(x[i], weights[i].T)
                return torch.mm(x[i], weights[i].T, out_dtype=dtype)

            error = error_of(call(0)[:64], expected, name, 3e-3)
            what = f"torch.mm {name} {N}x{inputs}x{outputs} to {str(dtype)[6:]}"
            line(what, seconds(call), 2.0 * N * inputs * outputs, "TFLOP/s", error)


PARTS: dict[str, Callable[[], None]] = {"attention": attention, "rows": rows, "products": products}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (of {', '.join(PARTS)})")
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA card; this machine has none.")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in parts:
        PARTS[part]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
