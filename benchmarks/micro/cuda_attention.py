"""One layer's decode attention on a CUDA card: time and GB/s of K/V by context, splits, stages and warps.

    python benchmarks/micro/cuda_attention.py [--shape gemma-3-4b] [--contexts 512 8192] [--recommended]

Each figure is a captured graph over several layers, more bytes together than the cache holds. "alone": the
launches back to back, each behind the one before. "in a chain": behind a small kernel that writes its
inputs, less the time of those kernels alone, which is nearer to what a token pays. Every variant is first
checked against float64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

if not torch.cuda.is_available():
    raise SystemExit("This times kernels on a CUDA card, and there is none here.")

import triton
import triton.language as tl

from larql_kv.backends.cuda.attention_step import AttentionScratch, attention_step, splits_for, stages_for
from larql_kv.backends.cuda.kernels.common import wait_for_previous
from larql_kv.backends.cuda.planes import Planes

BLOCK = 64
SHAPES = {
    "gemma-3-4b": (8, 4, 256, True),
    "llama-3.1-8b": (32, 8, 128, False),
    "smollm2-135m": (9, 3, 64, False),
}
RING = 1024  # Gemma's sliding layers
CACHE_BYTES = 150e6  # more than the second-level cache holds


@triton.jit
def write_inputs(source, qkv, count, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Stands for the projection: what attention waits for."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < count)
    wait_for_previous(PDL)
    tl.store(qkv + at, x, mask=at < count)


@dataclass(frozen=True)
class Variant:
    splits: int
    stages: int
    warps: int


class Layers:
    """Copies of one layer's pages at one context; the new token is always the same position."""

    def __init__(self, shape: str, context: int, ring: int) -> None:
        self.heads, self.kv_heads, self.head_dim, norm = SHAPES[shape]
        self.context, self.ring = context, ring
        self.position = context - 1 if not ring else 3 * ring + 5
        self.bytes = 4 * self.kv_heads * self.head_dim * context  # K and V, bfloat16
        blocks = -(-context // BLOCK)
        count = max(2, min(64, int(CACHE_BYTES // self.bytes) + 1))
        self.pages = [
            torch.randn(blocks, 2, self.kv_heads, BLOCK, self.head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(count)
        ]
        self.tables = [
            torch.tensor([block.data_ptr() for block in pages], dtype=torch.int64, device="cuda")
            for pages in self.pages
        ]
        self.pos = torch.tensor([self.position], dtype=torch.int32, device="cuda")
        angle = torch.rand(self.position + 1, self.head_dim // 2, device="cuda") * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.norm = torch.rand(self.head_dim, device="cuda") + 0.5 if norm else None
        self.source = torch.randn((self.heads + 2 * self.kv_heads) * self.head_dim, device="cuda")
        self.qkv = self.source.clone()
        self.out = torch.zeros(self.heads * self.head_dim, device="cuda")
        self.planes = Planes.empty(self.out.numel(), 8, "cuda")
        group = self.heads // self.kv_heads
        self.scratch = AttentionScratch.empty(self.kv_heads, group, self.head_dim, 128, "cuda")

    def attend(self, index: int, variant: Variant, pdl: bool, out: torch.Tensor | None = None) -> None:
        attention_step(
            self.qkv, self.tables[index], self.pos, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, cos=self.cos, sin=self.sin, q_norm=self.norm, k_norm=self.norm, eps=1e-6,
            scale=self.head_dim**-0.5, softcap=0.0, ring=self.ring, window=0, splits=variant.splits,
            partials=self.scratch, planes=self.planes, out=out, kv_stage=None, pdl=pdl, stages=variant.stages,
            warps=variant.warps,
        )  # fmt: skip

    def write(self, pdl: bool) -> None:
        count = self.source.numel()
        launch = {"launch_pdl": True} if pdl else {}
        write_inputs[(triton.cdiv(count, 64),)](
            self.source, self.qkv, count, SIZE=64, PDL=pdl, num_warps=1, **launch
        )

    def error(self, variant: Variant) -> float:
        """Relative error of layer 0 against float64, its new row taken from the page that was written."""
        self.attend(0, variant, False, self.out)
        slot = self.position % self.ring if self.ring else self.position
        stored = self.pages[0].double()  # (blocks, 2, kv_heads, 64, head_dim)
        keys, values = (
            stored[:, part].transpose(0, 1).reshape(self.kv_heads, -1, self.head_dim)[:, : self.context]
            for part in (0, 1)
        )
        q, k, v = self.qkv.double().view(-1, self.head_dim).split((self.heads, self.kv_heads, self.kv_heads))
        q, k = self._rotated(q), self._rotated(k)
        for name, row, kept in (("K", k, keys), ("V", v, values)):
            if not torch.allclose(kept[:, slot], row, rtol=2**-7, atol=1e-4):
                raise SystemExit(f"{variant}: the new {name} row is wrong")
        group = self.heads // self.kv_heads
        scores = torch.einsum("kgd,ktd->kgt", q.view(self.kv_heads, group, -1), keys) * self.head_dim**-0.5
        exact = torch.einsum("kgt,ktd->kgd", scores.softmax(2), values).reshape(-1)
        return float((self.out.double() - exact).norm() / exact.norm())

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            x = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * self.norm.double()
        a, b = x.chunk(2, 1)
        cos, sin = self.cos[self.position].double(), self.sin[self.position].double()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)


def microseconds(step: Callable[[int], object], layers: int) -> float:
    """Median time of one of `layers` steps captured together."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(layers):
            step(index)
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / layers)
    return statistics.median(times[5:])


def variants(layers: Layers, recommended: bool) -> list[Variant]:
    best = splits_for(layers.context, layers.kv_heads, head_dim=layers.head_dim)
    if recommended:
        return [Variant(best, stages_for(layers.context, best), 4)]
    halves = (
        {max(1, best // 2), best}
        if best * BLOCK >= layers.context
        else {max(1, best // 2), best, min(2 * best, 128)}
    )
    return [
        Variant(splits, stages, warps)
        for splits in sorted(halves)
        for stages in ((1,) if splits * BLOCK >= layers.context else (2, 3))
        for warps in (4, 8)
    ]


def measure(layers: Layers, variant: Variant) -> str:
    error = layers.error(variant)
    if not error < 1e-4:
        raise SystemExit(f"{variant}: relative error {error:.1e} against float64")
    count = len(layers.pages)
    figures = []
    for pdl in (False, True):
        attend = partial(layers.attend, variant=variant, pdl=pdl)
        write = partial(layers.write, pdl)
        figures.append(microseconds(attend, count))
        both = microseconds(lambda i, attend=attend, write=write: (write(), attend(i)), count)
        figures.append(both - microseconds(lambda _, write=write: write(), count))
    rates = " ".join(f"{us:8.2f} us {layers.bytes / us / 1e3:6.0f} GB/s" for us in figures)
    name = f"{variant.splits:4d} splits {variant.stages} stages {variant.warps} warps"
    return f"{name}  {rates}  error {error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gemma-3-4b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768, 131072])
    parser.add_argument("--recommended", action="store_true", help="only what splits_for and stages_for say")
    wanted = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {wanted.shape}")
    print("columns: alone, in a chain; then both with dependent launch")
    for context, ring in [*((n, 0) for n in wanted.contexts), (RING, RING)]:
        layers = Layers(wanted.shape, context, ring)
        print(f"{context} tokens{' in a ring' if ring else ''}, {len(layers.pages)} layers in turn")
        for variant in variants(layers, wanted.recommended):
            try:
                print("  " + measure(layers, variant), flush=True)
            except triton.runtime.errors.OutOfResources as refused:
                print(f"  {variant}: does not fit: {refused}", flush=True)


if __name__ == "__main__":
    main()
