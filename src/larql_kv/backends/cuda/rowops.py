"""Launchers of the row kernels: a prompt's rows through everything that is not a matrix product.

All tensors are contiguous and on one device. `table` is int64, the addresses of the blocks by index; slot
p (in a ring of `ring` slots: p % ring; ring 0 means none) lies in block slot // 64, row slot % 64.
"""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton

from larql_kv.backends.cuda.kernels import rows as kernels

NO_RING = 1 << 30  # slots of "no ring": more than any position
BLOCK_ROWS = 64
_ACTIVATIONS = {"silu": False, "gelu_tanh": True}


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` is contiguous, of this shape and of one of these dtypes."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} must be contiguous {kinds} {shape}, got {tensor.dtype} {tuple(tensor.shape)}{layout}"
        )


def check_table(table: torch.Tensor, ring: int, stop: int) -> int:
    """Slots of the ring (`NO_RING` without one); raises ValueError unless positions below `stop` fit."""
    check("table", table, (table.numel(),), torch.int64)
    if ring < 0 or not 0 <= stop < NO_RING:
        raise ValueError(f"ring must be >= 0 and positions in 0..{NO_RING - 1}, got {ring} and {stop}")
    slots = min(stop, ring) if ring else stop
    if slots > BLOCK_ROWS * table.numel():
        raise ValueError(f"{slots} rows do not fit {table.numel()} blocks of {BLOCK_ROWS}")
    return ring or NO_RING


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype = torch.bfloat16,
    round_input: bool = False,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight by rows: x (n, H), weight (H,) float32 -> (n, H) bf16 or float32.

    round_input: every x is first rounded to bf16, as a residual state stores it.
    """
    n, hidden = x.shape
    check("x", x, (n, hidden), torch.float32)
    check("weight", weight, (hidden,), torch.float32)
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    out = torch.empty(n, hidden, dtype=out_dtype, device=x.device)
    if n:
        block = triton.next_power_of_2(hidden)
        kernels.norm_kernel[(n,)](
            x, weight, out, eps, H=hidden, BLOCK=block, ROUND_INPUT=round_input, num_warps=_warps(block)
        )
    return out


def add_normed_(rows: torch.Tensor, update: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """rows += update, or rows += rms_norm(update) * weight, in place.

    rows (n, H) float32, update (n, H) float32 or bf16, weight (H,) float32.
    """
    n, hidden = rows.shape
    check("rows", rows, (n, hidden), torch.float32)
    check("update", update, (n, hidden), torch.float32, torch.bfloat16)
    if weight is not None:
        check("weight", weight, (hidden,), torch.float32)
    if n:
        block = triton.next_power_of_2(hidden)
        kernels.add_normed_kernel[(n,)](
            rows, update, weight, eps, H=hidden, BLOCK=block, num_warps=_warps(block)
        )


def rope_qkv(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [q | k | v] -> q (n, heads, D), k and v (n, kv_heads, D), bf16, D = head_dim.

    Bias first, then the RMS norm of every q and k head (where a weight is given), then the rotation
    a cos - b sin, b cos + a sin of the pairs (i, i + D/2).

    qkv (n, (heads + 2 kv_heads) D) float32 or bf16; bias of that width, cos and sin (n, D/2), q_norm and
    k_norm (D,) float32. heads may be 0: rows [k | v].
    """
    n, q_width, kv_width = len(qkv), heads * head_dim, kv_heads * head_dim
    width = q_width + 2 * kv_width
    check("qkv", qkv, (n, width), torch.float32, torch.bfloat16)
    check("cos", cos, (n, head_dim // 2), torch.float32)
    check("sin", sin, (n, head_dim // 2), torch.float32)
    for name, weight, size in (
        ("bias", bias, width),
        ("q_norm", q_norm, head_dim),
        ("k_norm", k_norm, head_dim),
    ):
        if weight is not None:
            check(name, weight, (size,), torch.float32)
    q, k, v = (
        torch.empty(n, count, head_dim, dtype=torch.bfloat16, device=qkv.device)
        for count in (heads, kv_heads, kv_heads)
    )
    if n:
        heads_p, half_p = triton.next_power_of_2(max(heads, 1)), triton.next_power_of_2(head_dim // 2)
        kernels.rope_qkv_kernel[(n,)](
            qkv, bias, cos, sin, q_norm, k_norm, q, k, v, eps,
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, HEADS_P=heads_p,
            KV_HEADS_P=triton.next_power_of_2(kv_heads), HALF_P=half_p, V_P=triton.next_power_of_2(kv_width),
            num_warps=_warps(2 * heads_p * half_p),
        )  # fmt: skip
    return q, k, v


def gated_act(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up: gate_up (n, 2F) float32 or bf16, gate first -> (n, F) bf16.

    activation: "silu" or "gelu_tanh".
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    n, width = gate_up.shape
    check("gate_up", gate_up, (n, width // 2 * 2), torch.float32, torch.bfloat16)
    out = torch.empty(n, width // 2, dtype=torch.bfloat16, device=gate_up.device)
    if n:
        block = min(1024, triton.next_power_of_2(width // 2))
        kernels.gated_kernel[(n, triton.cdiv(width // 2, block))](
            gate_up, out, F=width // 2, BLOCK=block, GELU=_ACTIVATIONS[activation], num_warps=4
        )
    return out


def append_rows(
    k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, ring: int, first: int, skip: int
) -> None:
    """Write rows skip.. of k, v (n, kv_heads, D) bf16 into the slots of positions first + skip .. .

    Blocks are (2, kv_heads, 64, D) bf16, K then V; the last one of a ring has only the rows it needs. Of
    rows that share a slot of a ring the last stays.
    """
    n, kv_heads, head_dim = k.shape
    check("k", k, (n, kv_heads, head_dim), torch.bfloat16)
    check("v", v, (n, kv_heads, head_dim), torch.bfloat16)
    slots = check_table(table, ring, first + n)
    skip = max(skip, n - slots)
    if skip < n:
        padded = triton.next_power_of_2(head_dim)
        heads_each = max(1, 4096 // padded)
        kernels.append_kernel[(triton.cdiv((n - skip) * kv_heads, heads_each),)](
            k[skip:], v[skip:], table, n - skip, first + skip, slots,
            KV_HEADS=kv_heads, D=head_dim, DP=padded, R=heads_each, num_warps=4,
        )  # fmt: skip


def write_rows(rows: torch.Tensor, table: torch.Tensor, ring: int, first: int, skip: int) -> None:
    """Write rows skip.. of rows (n, H) float32, as bf16, into the slots of positions first + skip .. .

    Blocks are (64, H) bf16. Of rows that share a slot of a ring the last stays.
    """
    n, hidden = rows.shape
    check("rows", rows, (n, hidden), torch.float32)
    slots = check_table(table, ring, first + n)
    skip = max(skip, n - slots)
    if skip < n:
        block = min(1024, triton.next_power_of_2(hidden))
        kernels.write_rows_kernel[(n - skip, triton.cdiv(hidden, block))](
            rows[skip:], table, first + skip, slots, H=hidden, BLOCK=block, num_warps=4
        )


def read_rows(table: torch.Tensor, ring: int, first: int, stop: int, hidden: int) -> torch.Tensor:
    """Rows of positions first..stop-1 out of (64, hidden) bf16 blocks -> (stop - first, hidden) float32."""
    slots = check_table(table, ring, stop)
    n = max(0, stop - first)
    out = torch.empty(n, hidden, dtype=torch.float32, device=table.device)
    if n:
        block = min(1024, triton.next_power_of_2(hidden))
        kernels.read_rows_kernel[(n, triton.cdiv(hidden, block))](
            table, out, first, slots, H=hidden, BLOCK=block, num_warps=4
        )
    return out
