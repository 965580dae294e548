"""One step's attention over a paged K/V store: time and GB/s of K/V by context length."""

from __future__ import annotations

import torch
from common import Result, median_seconds

from larql_kv.backends.cpu import ops

# (heads, kv_heads, head_dim): SmolLM2-135M, Gemma 3 270M, an 8B-class model.
SHAPES = ((9, 3, 64), (4, 1, 256), (32, 8, 128))
CONTEXTS = (128, 512, 2048, 8192)


def run(quick: bool, roof: float) -> list[Result]:
    """`roof`: read bandwidth in GB/s. Small stores lie in cache and may exceed it."""
    results = []
    for heads, kv_heads, head_dim in SHAPES[:1] if quick else SHAPES:
        for bf16 in (False, True):
            for context in (64, 200) if quick else CONTEXTS:
                dtype = torch.bfloat16 if bf16 else torch.float32
                blocks = [
                    torch.randn(2, kv_heads, ops.KV_BLOCK_ROWS, head_dim).to(dtype)
                    for _ in range(-(-context // ops.KV_BLOCK_ROWS))
                ]
                table = torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64)
                view = ops.KvStore(table, is_bf16=bf16)
                q = torch.randn(1, heads, head_dim)
                k, v = torch.randn(1, kv_heads, head_dim), torch.randn(1, kv_heads, head_dim)
                seconds = median_seconds(
                    lambda _, q=q, k=k, v=v, view=view, n=context: ops.attend(q, k, v, view, n, None, 0.1),
                    0.02 if quick else 0.2,
                )
                moved = 2 * kv_heads * context * head_dim * dtype.itemsize
                rate = moved / seconds / 1e9
                case = f"{heads}/{kv_heads} heads of {head_dim}, {str(dtype)[6:]}, {context} rows"
                results.append(Result("attention", case, 1e6 * seconds, rate, "GB/s", rate / roof))
    return results
