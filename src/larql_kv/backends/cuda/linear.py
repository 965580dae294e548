"""One row through one or more matrices: which launches, with which tiles."""

# Triton's annotations know neither launch options nor that next_power_of_2 gives an int.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton

from larql_kv.backends.cuda.kernels import step_linear
from larql_kv.backends.cuda.kernels.common import INTERPRET
from larql_kv.backends.cuda.packed import FloatMatrix, Matrix, PackedMatrix
from larql_kv.backends.cuda.planes import Planes

_MOST_CHUNKS = 64  # of a float row: the kernel's loop over them is unrolled
_EMPTY: dict[torch.device, torch.Tensor] = {}


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one in front has finished."""
    return {"launch_pdl": True} if pdl and not INTERPRET else {}


def nothing(device: torch.device) -> torch.Tensor:
    """What an unused pointer argument points at."""
    if device not in _EMPTY:
        _EMPTY[device] = torch.zeros(16, dtype=torch.int32, device=device)
    return _EMPTY[device]


@dataclass(frozen=True)
class Norm:
    """The prologue: x + update -> x_out; its norm is what the matrix multiplies.

    `keep`: the residual pages and their device table, for the row of position `pos`. `stage`: a bfloat16 row
    that gets a copy for the host.
    """

    x: torch.Tensor  # float32 (hidden,)
    update: torch.Tensor | None
    post: torch.Tensor | None
    weight: torch.Tensor
    x_out: torch.Tensor
    eps: float
    pos: torch.Tensor | None = None
    keep_table: torch.Tensor | None = None
    keep_ring: int = 0
    stage: torch.Tensor | None = None
    round: bool = False  # norm the row as rounded to bfloat16: what a residual state derives K/V from


@dataclass(frozen=True)
class Head:
    """Logits with their soft cap, and the largest of each tile with its row."""

    best: torch.Tensor  # float32 (tiles,)
    best_at: torch.Tensor  # int32 (tiles,)
    cap: float = 0.0


@dataclass(frozen=True)
class Glu:
    """Gated activation of interleaved gate and up rows (32 and 32), as planes or as a float32 vector."""

    out: Planes | torch.Tensor
    gelu: bool


@dataclass
class RowLinear:
    """Stacked matrices of one input width. `bias` float32, one value a row of the stack, in its order."""

    matrices: Sequence[Matrix]
    bias: torch.Tensor | None = None
    bits: int = 8  # of the activations; 32 where a matrix is stored as floats
    plain_bias: torch.Tensor | None = None  # in the order of the model's own rows (default: `bias`)
    _biases: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(isinstance(matrix, FloatMatrix) for matrix in self.matrices):
            if any(isinstance(matrix, PackedMatrix) for matrix in self.matrices):
                raise ValueError("stored and quantised floats cannot be stacked in one launch")
            self.bits = 32
        if self.plain_bias is None:
            self.plain_bias = self.bias
        first = 0
        for matrix in self.matrices:
            part = None if self.bias is None else self.bias[first : first + matrix.rows]
            self._biases.append(None if part is None else _padded(part, matrix))
            first += matrix.rows

    @property
    def rows(self) -> int:
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def columns(self) -> int:
        return self.matrices[0].columns

    @property
    def groups(self) -> int:
        """Groups that the activation planes must have room for."""
        first = self.matrices[0]
        return first.groups if isinstance(first, PackedMatrix) else -(-first.columns // 32)

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def tiles(self) -> int:
        """Output tiles of the first matrix: entries that a Head needs."""
        return self.matrices[0].tiles

    @property
    def scratch_words(self) -> int:
        """int32 words of scratch that a launch with a Norm needs."""
        programs = sum(matrix.tiles for matrix in self.matrices)
        per = 512 * _parts(self.columns) if self.bits == 32 else (self.bits + 3) * self.groups
        return programs * per

    def run(
        self,
        before: Planes | torch.Tensor | Norm,
        after: torch.Tensor | Glu | Head,
        out: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
        pdl: bool = False,
        tiles_each: int = 1,
    ) -> None:
        """`after` a float32 tensor: the products go there. With a Head, logits go to `out`.

        `before` is ready planes (or a float32 vector for stored floats), or a Norm, which needs `scratch`.
        """
        if self.bits == 32:
            first = 0
            for matrix, bias in zip(self.matrices, self._biases, strict=True):
                target = after[first:] if isinstance(after, torch.Tensor) else after
                self._run_float(matrix, bias, before, target, out, scratch, pdl)
                first += matrix.rows
            return
        first = 0
        for index in range(0, len(self.matrices), 2):
            pair = self.matrices[index : index + 2]
            offsets = [first, first + pair[0].rows]
            self._run_packed(
                pair, self._biases[index : index + 2], offsets, before, after, out, scratch, pdl, tiles_each
            )
            first += sum(matrix.rows for matrix in pair)

    def _run_packed(
        self,
        pair: Sequence[Matrix],
        biases: Sequence[torch.Tensor | None],
        offsets: Sequence[int],
        before: Planes | torch.Tensor | Norm,
        after: torch.Tensor | Glu | Head,
        out: torch.Tensor | None,
        scratch: torch.Tensor | None,
        pdl: bool,
        tiles_each: int,
    ) -> None:
        a = pair[0]
        b = pair[1] if len(pair) == 2 else None
        assert isinstance(a, PackedMatrix)
        assert b is None or isinstance(b, PackedMatrix)
        if b is not None and b.tile != a.tile:
            raise ValueError(f"stacked matrices need one tile, got {a.tile} and {b.tile}")
        none = nothing(a.codes.device)
        stored = after if isinstance(after, torch.Tensor) else out
        planes = before if isinstance(before, Planes) else None
        if planes is not None and (planes.groups < a.groups or planes.bits != self.bits):
            raise ValueError(f"planes of {planes.groups} groups, {planes.bits} bits do not fit {self}")
        programs = -(-a.tiles // tiles_each) + (0 if b is None else b.tiles)
        step_linear.packed_linear[(programs,)](
            *_pointers(a, none),
            a.rows,
            a.tiles,
            *_pointers(a if b is None else b, none),
            0 if b is None else b.rows,
            none if stored is None else stored[offsets[0] :],
            none if stored is None else stored[offsets[1] :] if b is not None else stored,
            none if biases[0] is None else biases[0],
            none if b is None or biases[1] is None else biases[1],
            *((planes.q, planes.scale, planes.sums, planes.groups) if planes else (none, none, none, 0)),
            *_norm_pointers(before, none, scratch),
            *_after_pointers(after, none),
            tiles_each,
            K=a.columns,
            PARTS=_parts(32 * a.groups),  # padding included: the product reads its scratch
            GROUPS_ALL=a.groups,
            ROWS=a.tile.rows,
            GROUPS=a.tile.groups,
            AHEAD=min(a.tile.ahead, a.codes.shape[1]),
            CODES_A=a.fmt.code_bits,
            SCALE_A=a.fmt.scale,
            ZERO_A=a.fmt.zero,
            CODES_B=0 if b is None else b.fmt.code_bits,
            SCALE_B=0 if b is None else b.fmt.scale,
            ZERO_B=0 if b is None else b.fmt.zero,
            BITS=self.bits,
            **_norm_switches(before),
            **_after_switches(after),
            BIAS=biases[0] is not None,
            PDL=pdl,
            num_warps=a.tile.warps,
            num_stages=1,
            maxnreg=a.tile.registers,
            **pdl_options(pdl),
        )

    def _run_float(
        self,
        matrix: Matrix,
        bias: torch.Tensor | None,
        before: Planes | torch.Tensor | Norm,
        after: torch.Tensor | Glu | Head,
        out: torch.Tensor | None,
        scratch: torch.Tensor | None,
        pdl: bool,
    ) -> None:
        assert isinstance(matrix, FloatMatrix)
        none = nothing(matrix.data.device)
        tile = matrix.tile
        if isinstance(after, Glu) and tile.rows > 64:
            raise ValueError(f"gate and up rows are stored 32 and 32: no tiles of {tile.rows} rows")
        stored = after if isinstance(after, torch.Tensor) else out
        least = -(-matrix.columns // _MOST_CHUNKS)
        wanted = tile.step * 2 // matrix.data.itemsize  # as many bytes, whatever is stored
        step = triton.next_power_of_2(min(max(wanted, least), matrix.columns))
        step_linear.float_linear[(matrix.tiles,)](
            matrix.data,
            matrix.rows,
            none if stored is None else stored,
            none if bias is None else bias,
            before if isinstance(before, torch.Tensor) else none,
            *_norm_pointers(before, none, scratch),
            *_after_pointers(after, none),
            K=matrix.columns,
            PARTS=_parts(matrix.columns),
            ROWS=tile.rows,
            STEP=step,
            AHEAD=min(tile.ahead, -(-matrix.columns // step)),
            **_norm_switches(before),
            **_after_switches(after),
            BIAS=bias is not None,
            PDL=pdl,
            num_warps=tile.warps,
            maxnreg=tile.registers,
            **pdl_options(pdl),
        )


def last_norm(
    norm: Norm, hidden: torch.Tensor, planes: Planes | torch.Tensor, advance: torch.Tensor | None, pdl: bool
) -> None:
    """x + update into `hidden` (float32), its norm into `planes`; `advance` (the position) goes up by one."""
    none = nothing(norm.x.device)
    packed = isinstance(planes, Planes)
    step_linear.last_norm[(1,)](
        norm.x,
        none if norm.update is None else norm.update,
        none if norm.post is None else norm.post,
        norm.weight,
        hidden,
        none if advance is None else advance,
        planes.q if packed else planes,
        planes.scale if packed else none,
        planes.sums if packed else none,
        planes.groups if packed else 0,
        norm.eps,
        K=norm.x.shape[0],
        PARTS=_parts(norm.x.shape[0]),
        UPDATE=norm.update is not None,
        POST=norm.post is not None,
        ADVANCE=advance is not None,
        BITS=planes.bits if packed else 32,
        PDL=pdl,
        num_warps=8,
        **pdl_options(pdl),
    )


def quantise_row(x: torch.Tensor, planes: Planes, pdl: bool) -> None:
    """A float32 row (n,) as planes."""
    step_linear.quantise_row[(1,)](
        x,
        planes.q,
        planes.scale,
        planes.sums,
        planes.groups,
        K=x.shape[0],
        PARTS=_parts(32 * planes.groups),
        BITS=planes.bits,
        PDL=pdl,
        num_warps=8,
        **pdl_options(pdl),
    )


def _parts(columns: int) -> int:
    """Pieces of 16 groups that a row is taken in."""
    return -(-columns // 512)


def _padded(bias: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """A bias as long as the matrix's tiles are tall: kernels read whole tiles."""
    return torch.nn.functional.pad(bias, (0, matrix.tiles * matrix.tile.rows - len(bias)))


def _pointers(matrix: PackedMatrix, none: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return matrix.codes, matrix.small, none if matrix.super is None else matrix.super


def _norm_pointers(
    before: Planes | torch.Tensor | Norm, none: torch.Tensor, scratch: torch.Tensor | None
) -> tuple[torch.Tensor | float, ...]:
    if not isinstance(before, Norm):
        return (*(none,) * 9, 0.0)
    given = (
        before.x,
        before.update,
        before.post,
        before.weight,
        before.x_out,
        before.keep_table,
        before.pos,
        before.stage,
        scratch,
    )
    return (*(none if item is None else item for item in given), before.eps)


def _norm_switches(before: Planes | torch.Tensor | Norm) -> dict[str, int | bool]:
    norm = before if isinstance(before, Norm) else None
    return {
        "BEFORE": int(norm is not None),
        "UPDATE": norm is not None and norm.update is not None,
        "POST": norm is not None and norm.post is not None,
        "RING": norm.keep_ring if norm is not None else 0,
        "KEEP": norm is not None and norm.keep_table is not None,
        "STAGE": norm is not None and norm.stage is not None,
        "ROUND": norm is not None and norm.round,
    }


def _after_pointers(
    after: torch.Tensor | Glu | Head, none: torch.Tensor
) -> tuple[torch.Tensor | float | int, ...]:
    if isinstance(after, Head):
        return none, none, none, 0, after.best, after.best_at, after.cap
    if isinstance(after, Glu):
        if isinstance(after.out, Planes):
            return after.out.q, after.out.scale, after.out.sums, after.out.groups, none, none, 0.0
        return after.out, none, none, 0, none, none, 0.0
    return none, none, none, 0, none, none, 0.0


def _after_switches(after: torch.Tensor | Glu | Head) -> dict[str, int | bool]:
    glu = after if isinstance(after, Glu) else None
    return {
        "AFTER": 1 if glu is not None else 2 if isinstance(after, Head) else 0,
        "GELU": glu is not None and glu.gelu,
        "CAP": isinstance(after, Head) and after.cap > 0,
        "OUT_BITS": 32 if glu is None or not isinstance(glu.out, Planes) else glu.out.bits,
    }
