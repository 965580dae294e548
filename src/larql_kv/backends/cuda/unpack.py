"""Packed matrices as rows again: into prefill's workspace, and one embedding row a token."""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton

from larql_kv.backends.cuda.kernels import unpack as kernels
from larql_kv.backends.cuda.linear import nothing, pdl_options
from larql_kv.backends.cuda.packed import FloatMatrix, Matrix, PackedMatrix


def unpack_into(matrix: Matrix, out: torch.Tensor, first: int = 0, glu: bool = False) -> None:
    """Rows first.. of the matrix as `out` (rows, columns) bfloat16 or float32. `glu`: all rows, which were
    interleaved by `glu_order`; they come back as [gate | up], and `out` has no padding rows."""
    if isinstance(matrix, FloatMatrix):
        data = matrix.data
        if glu:
            half = out.shape[0] // 2
            tiles = data.view(-1, 2, 32, data.shape[1]).transpose(0, 1)
            for part in range(2):
                out[part * half : (part + 1) * half].copy_(tiles[part].reshape(-1, data.shape[1])[:half])
        else:
            out.copy_(data[first : first + len(out)])
        return
    _launch(matrix, nothing(out.device), out, len(out), 1.0, first, gather=False, glu=glu, pdl=False)


def gather_into(matrix: Matrix, ids: torch.Tensor, out: torch.Tensor, scale: float, pdl: bool) -> None:
    """out (n, columns) float32 = scale * rows `ids` (n,) int32 or int64 of the matrix."""
    if isinstance(matrix, PackedMatrix):
        _launch(matrix, ids, out, len(ids), scale, 0, gather=True, glu=False, pdl=pdl)
        return
    step = min(1024, triton.next_power_of_2(matrix.columns))
    kernels.gather_rows[(len(ids), triton.cdiv(matrix.columns, step))](
        matrix.data,
        ids,
        out,
        scale,
        len(ids),
        K=matrix.columns,
        HEIGHT=1,
        STEP=step,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )


def _launch(
    matrix: PackedMatrix,
    ids: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    scale: float,
    first: int,
    gather: bool,
    glu: bool,
    pdl: bool,
) -> None:
    fmt, tile = matrix.fmt, matrix.tile
    height = 1 if gather else min(8, tile.rows)
    step = min(512, triton.next_power_of_2(matrix.columns))
    kernels.unpack_rows[(triton.cdiv(rows, height), triton.cdiv(matrix.columns, step))](
        matrix.codes,
        matrix.small,
        nothing(out.device) if matrix.super is None else matrix.super,
        ids,
        out,
        first,
        scale,
        rows,
        K=matrix.columns,
        NC=matrix.codes.shape[1],
        ROWS=tile.rows,
        GROUPS=tile.groups,
        CODES=fmt.code_bits,
        SCALE=fmt.scale,
        ZERO=fmt.zero,
        GATHER=gather,
        GLU=glu,
        HEIGHT=height,
        STEP=step,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
