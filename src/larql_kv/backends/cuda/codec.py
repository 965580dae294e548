"""Launchers of the codec kernels: larql_kv/codec's formats on the card, bit for bit.

Nothing is checked for being finite: a vector or row that its codec cannot hold decodes to values that are
not, and is found where the others are. float32 and bf16 rows need no kernel: torch converts them.
"""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from larql_kv.backends.cuda.kernels import codec as kernels
from larql_kv.backends.cuda.kernels import turbo as turbo_kernels
from larql_kv.backends.cuda.rowops import check
from larql_kv.codec.integer import ClippedRows, GroupedRows
from larql_kv.codec.outliers import kept
from larql_kv.codec.plain import PlainRows
from larql_kv.codec.rows import RowCodec
from larql_kv.codec.turbo import TurboCode
from larql_kv.codec.turbo_rows import OUTLIERS, TurboRows
from larql_kv.errors import BackendUnavailable

_FLOATS = (torch.float32, torch.bfloat16)


def _factor(code: TurboCode) -> float:
    return float(np.float32(1 / math.sqrt(code.block)))


def _vectors(code: TurboCode) -> dict[str, Any]:
    """Constants of the kernels over vectors of `code`."""
    return {
        "DIM": code.dim,
        "DIM_P": triton.next_power_of_2(code.dim),
        "num_warps": 1 if code.dim <= 256 else 4,
        "enable_fp_fusion": False,
    }


def _exponent(size: int) -> int:
    return size.bit_length() - 1


def rotate(code: TurboCode, x: Tensor) -> Tensor:
    """R x: x (n, dim) float32 or bf16 -> (n, dim) float32."""
    n = len(x)
    check("x", x, (n, code.dim), *_FLOATS)
    out = torch.empty(n, code.dim, device=x.device)
    if n:
        turbo_kernels.rotate_kernel[(n,)](
            x, out, LOG=_exponent(code.block), FACTOR=_factor(code), **_vectors(code)
        )
    return out


def _check_places(code: TurboCode, codes: Tensor, scales: Tensor, mean: Tensor | None) -> tuple[int, int]:
    rows, heads = scales.shape
    if (
        codes.dtype is not torch.uint8
        or codes.shape != (rows, heads, code.code_bytes)
        or codes.stride(2) != 1
    ):
        raise ValueError(
            f"codes must be uint8 {(rows, heads, code.code_bytes)}, its last axis contiguous, got "
            f"{codes.dtype} {tuple(codes.shape)}"
        )
    if scales.dtype is not torch.float32:
        raise ValueError(f"scales must be float32, got {scales.dtype}")
    if mean is not None:
        check("mean", mean, (heads, code.dim), torch.float32)
    return rows, heads


def encode_into(
    code: TurboCode,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    mean: Tensor | None = None,
    is_rotated: bool = True,
) -> None:
    """Code x (rows, heads, dim) float32 or bf16 into codes (rows, heads, code_bytes) uint8 and scales
    (rows, heads) float32, all strided as they are.

    mean (heads, dim) float32, rotated, is taken off first. is_rotated: whether x is, else it is rotated here.
    """
    rows, heads = _check_places(code, codes, scales, mean)
    if x.dtype not in _FLOATS or x.shape != (rows, heads, code.dim) or x.stride(2) != 1:
        raise ValueError(
            f"x must be float32 or bfloat16 {(rows, heads, code.dim)}, its last axis contiguous, got "
            f"{x.dtype} {tuple(x.shape)}"
        )
    if rows * heads:
        turbo_kernels.encode_kernel[(rows * heads,)](
            x, mean, codes, scales, heads, x.stride(0), x.stride(1), codes.stride(0), codes.stride(1),
            scales.stride(0), scales.stride(1), *code.coefficients, BITS=code.bits, LOG=_exponent(code.block),
            ROOT=math.sqrt(code.dim), FACTOR=0.0 if is_rotated else _factor(code), **_vectors(code),
        )  # fmt: skip


def decode(code: TurboCode, codes: Tensor, scales: Tensor, mean: Tensor | None = None) -> Tensor:
    """Codes (rows, heads, code_bytes) uint8 and scales (rows, heads) float32, plus mean (heads, dim) ->
    rotated (rows, heads, dim) float32."""
    rows, heads = _check_places(code, codes, scales, mean)
    out = torch.empty(rows, heads, code.dim, device=codes.device)
    if out.numel():
        turbo_kernels.decode_kernel[(rows * heads,)](
            codes, scales, mean, out, heads, codes.stride(0), codes.stride(1), scales.stride(0),
            scales.stride(1), *code.coefficients, BITS=code.bits, **_vectors(code),
        )  # fmt: skip
    return out


def _check_weight(weight: Tensor | None, width: int) -> None:
    if weight is not None:
        check("weight", weight, (width,), torch.float32)


def _warps(padded: int) -> int:
    return min(16, max(1, padded // 256))


class _RowKernels(NamedTuple):
    encode: Any
    decode: Any
    numbers: tuple[float, ...]  # arguments of both, after the strides
    constants: dict[str, Any]  # of both
    encode_constants: dict[str, Any]  # of `encode` alone


def _row_kernels(codec: RowCodec, width: int) -> _RowKernels:
    padded = triton.next_power_of_2(width)
    encode_constants: dict[str, Any] = {"LARGEST": codec.largest}
    if isinstance(codec, GroupedRows):
        padded = max(padded, codec.group)
        encode, decode, numbers = kernels.encode_grouped_kernel, kernels.decode_grouped_kernel, ()
        constants = {"BITS": codec.bits, "GROUP": codec.group, "KEPT": kept(width, codec.outliers)}
    elif isinstance(codec, ClippedRows):
        encode, decode, numbers = kernels.encode_clipped_kernel, kernels.decode_clipped_kernel, ()
        constants = {}
        encode_constants["LOG"] = _exponent(padded)
    elif isinstance(codec, TurboRows):
        code = codec.code(width)
        encode, decode = kernels.encode_turbo_rows_kernel, kernels.decode_turbo_rows_kernel
        numbers = code.coefficients
        constants = {"BITS": code.bits, "LOG": _exponent(code.dim), "KEPT": kept(width, OUTLIERS)}
        constants["FACTOR"] = _factor(code)
        encode_constants["ROOT"] = math.sqrt(code.dim)
    else:
        raise BackendUnavailable(f"the CUDA backend has no kernel for codec {codec.name}")
    constants |= {"WIDTH": width, "WIDTH_P": padded, "num_warps": _warps(padded), "enable_fp_fusion": False}
    return _RowKernels(encode, decode, numbers, constants, encode_constants)


def encode_rows(
    codec: RowCodec, rows: Tensor, weight: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Rows (n, width) float32 or bf16 -> (n, codec.bytes_per_row(width)) uint8; weight (width,) float32 as
    in `RowCodec`. `out` takes the bytes, its rows strided as they are.

    Raises BackendUnavailable for a codec without a kernel.
    """
    n, width = rows.shape
    size = codec.bytes_per_row(width)
    check("rows", rows, (n, width), *_FLOATS)
    _check_weight(weight, width)
    if out is None:
        out = torch.empty(n, size, dtype=torch.uint8, device=rows.device)
    elif out.dtype is not torch.uint8 or out.shape != (n, size) or out.stride(1) != 1:
        raise ValueError(f"out must be uint8 {(n, size)}, got {out.dtype} {tuple(out.shape)}")
    if isinstance(codec, PlainRows):
        out.copy_(codec.encode(rows.float()))
    elif n:
        found = _row_kernels(codec, width)
        found.encode[(n,)](
            rows, weight, out, rows.stride(0), out.stride(0), *found.numbers, **found.constants,
            **found.encode_constants,
        )  # fmt: skip
    return out


def decode_rows(codec: RowCodec, codes: Tensor, width: int, weight: Tensor | None = None) -> Tensor:
    """Coded rows (n, codec.bytes_per_row(width)) uint8, strided as they are -> (n, width) float32."""
    n, size = len(codes), codec.bytes_per_row(width)
    if codes.dtype is not torch.uint8 or codes.shape != (n, size) or codes.stride(1) != 1:
        raise ValueError(f"codes must be uint8 {(n, size)}, got {codes.dtype} {tuple(codes.shape)}")
    _check_weight(weight, width)
    if isinstance(codec, PlainRows):
        return codec.decode(codes, width)
    out = torch.empty(n, width, device=codes.device)
    if n:
        found = _row_kernels(codec, width)
        found.decode[(n,)](codes, weight, out, codes.stride(0), *found.numbers, **found.constants)
    return out
