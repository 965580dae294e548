"""Turbo codes of float32 rows on the CPU: rotate, encode into strided places, decode. codec/turbo.py has the
format; codes and scales are its bits."""

from __future__ import annotations

import torch
from torch import Tensor

from larql_kv.backends.cpu.rowop_kernels import PARALLEL_FLOATS
from larql_kv.backends.cpu.runtime import MAX_THREADS, sync_threads, thread_scratch
from larql_kv.backends.cpu.turbo_kernels import (
    decode_rows_kernel,
    encode_rows_kernel,
    encode_rows_kernel_serial,
    rotate_rows_kernel,
    rotate_rows_kernel_serial,
)
from larql_kv.backends.cpu.turn_kernels import turn_kernel, turn_kernel_serial
from larql_kv.codec.turbo import TurboCode

_DECODE_ROWS = 64  # a task


def rotate_(code: TurboCode, x: Tensor) -> Tensor:
    """R x over the last axis, in place: (..., dim) contiguous float32. Returns x."""
    if x.dtype is not torch.float32 or x.dim() == 0 or x.shape[-1] != code.dim or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32 (..., {code.dim}), got {x.dtype} {tuple(x.shape)}")
    rows = x.numel() // code.dim
    if x.numel() >= PARALLEL_FLOATS:
        sync_threads()
        rotate_rows_kernel(x.data_ptr(), rows, code.dim)
    else:
        rotate_rows_kernel_serial(x.data_ptr(), rows, code.dim)
    return x


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, inner: bool) -> None:
    """inner: whether the last axis has to be contiguous."""
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape or (inner and tensor.stride(-1) != 1):
        kind = str(dtype).removeprefix("torch.")
        layout = ", its last axis contiguous" if inner else ""
        raise ValueError(f"{name} must be {kind} {shape}{layout}, got {tensor.dtype} {tuple(tensor.shape)}")


def _mean_address(code: TurboCode, mean: Tensor | None, heads: int) -> int:
    if mean is None:
        return 0
    if mean.dtype is not torch.float32 or mean.shape != (heads, code.dim) or not mean.is_contiguous():
        raise ValueError(
            f"mean must be contiguous float32 ({heads}, {code.dim}), got {mean.dtype} {tuple(mean.shape)}"
        )
    return mean.data_ptr()


def encode_into(
    code: TurboCode, x: Tensor, codes: Tensor, scales: Tensor, mean: Tensor | None = None
) -> None:
    """Code rotated x (rows, heads, dim) float32 into codes (rows, heads, code_bytes) uint8 and scales
    (rows, heads) float32, all strided as they are; mean (heads, dim) float32 is taken off first."""
    rows, heads = x.shape[0], x.shape[1]
    _check("x", x, (rows, heads, code.dim), torch.float32, True)
    _check("codes", codes, (rows, heads, code.code_bytes), torch.uint8, True)
    _check("scales", scales, (rows, heads), torch.float32, False)
    mean_at = _mean_address(code, mean, heads)
    floats = (code.dim + code.dim // 16 + 15) // 16 * 16
    is_large = x.numel() >= PARALLEL_FLOATS
    threads = sync_threads() if is_large else 1
    scratch = thread_scratch("turbo", min(threads, MAX_THREADS) * floats)
    (encode_rows_kernel if is_large else encode_rows_kernel_serial)(
        code.bits, x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1), rows, heads, code.dim, mean_at,
        codes.data_ptr(), codes.stride(0), codes.stride(1),
        scales.data_ptr(), 4 * scales.stride(0), 4 * scales.stride(1), scratch, 4 * floats,
        *code.coefficients,
    )  # fmt: skip


def decode_rows(code: TurboCode, codes: Tensor, scales: Tensor, mean: Tensor | None = None) -> Tensor:
    """Codes (n, code_bytes) uint8, rows strided, and scales (n,) contiguous float32, plus mean (dim,) ->
    rotated vectors (n, dim) float32."""
    n = codes.shape[0]
    _check("codes", codes, (n, code.code_bytes), torch.uint8, True)
    _check("scales", scales, (n,), torch.float32, True)
    mean_at = _mean_address(code, None if mean is None else mean[None], 1)
    out = torch.empty(n, code.dim)
    sync_threads()
    decode_rows_kernel(
        code.bits, codes.data_ptr(), codes.stride(0), scales.data_ptr(), n, code.dim, out.data_ptr(), mean_at,
        _DECODE_ROWS, *code.coefficients,
    )  # fmt: skip
    return out


def turn(
    q: Tensor, k: Tensor, v: Tensor, code: TurboCode, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(R q, R (q * scale), R k, R v), fresh: q (n, heads, dim), k and v (n, kv_heads, dim) contiguous
    float32, scale (kv_heads, dim) float32 or None for ones."""
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    for name, t, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
        if t.dtype is not torch.float32 or t.shape != (n, count, code.dim) or not t.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 ({n}, {count}, {code.dim}), got {t.dtype} "
                f"{tuple(t.shape)}"
            )
    if scale is not None and (
        scale.dtype is not torch.float32 or scale.shape != (kv_heads, dim) or not scale.is_contiguous()
    ):
        raise ValueError(f"scale must be contiguous float32 ({kv_heads}, {dim}), got {tuple(scale.shape)}")
    sizes = [q.numel(), q.numel(), k.numel(), k.numel()]
    out = torch.empty(sum(sizes))
    is_large = out.numel() >= PARALLEL_FLOATS
    if is_large:
        sync_threads()
    (turn_kernel if is_large else turn_kernel_serial)(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if scale is None else scale.data_ptr(), out.data_ptr(),
        n, heads, kv_heads, dim,
    )  # fmt: skip
    parts = out.split(sizes)
    return parts[0].view(q.shape), parts[1].view(q.shape), parts[2].view(k.shape), parts[3].view(k.shape)
