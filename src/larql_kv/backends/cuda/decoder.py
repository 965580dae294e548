"""The decoder's arithmetic on CUDA: prompts by matrix products on unpacked weights, one row by the packed
kernels. Decode steps do not come through here: they are captured graphs (step.py)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from larql_kv.backends.cuda import rowops
from larql_kv.backends.cuda.attention_prefill import attend
from larql_kv.backends.cuda.linear import Glu, Head, Norm, RowLinear, last_norm, quantise_row
from larql_kv.backends.cuda.packed import PackedMatrix, Tile
from larql_kv.backends.cuda.planes import Planes
from larql_kv.backends.cuda.rope import DeviceRope
from larql_kv.backends.cuda.unpack import gather_into, unpack_into
from larql_kv.backends.cuda.weights import DEFAULT_ACTIVATIONS, LayerWeights, Weights, is_float
from larql_kv.errors import BackendUnavailable

if TYPE_CHECKING:
    from larql_kv.codec.turbo import TurboCode
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.rope import RopeTable
    from larql_kv.model.tensors import TensorSource
    from larql_kv.state.kv_rows import KvRows
    from larql_kv.state.pages import PagedRows

_HEAD_ROWS = 32768  # vocabulary rows unpacked at once


class CudaDecoder:
    """K/V and residual rows are bfloat16; hidden rows float32.

    Weights stay in their stored precision (`formats.py`). A prompt's products read one matrix at a time
    out of a reused bfloat16 workspace; a single row is multiplied straight from the packed form.
    """

    name = "cuda"
    kv_dtype = torch.bfloat16
    prefill_rows = 4096  # rows run at once
    masked_capture = True
    # Mean KL (nats) of steps against one pass: quantised activations here, bfloat16 there, each within
    # 2e-3 of float32 (docs/cuda.md) with an error of its own.
    form_bound = 4e-3

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        ropes: Sequence[RopeTable],
        device: torch.device,
        activations: str | None = None,
        tiles: Mapping[str, Tile] | None = None,
    ) -> None:
        """`activations`: int8, mixed (None) or int16: what quantised weights meet in a step."""
        from larql_kv.backends.cuda.step import StepExecutor

        self.config = config
        self.device = device
        self.activations = activations or DEFAULT_ACTIVATIONS
        self.weights = Weights(config, source, device, self.activations, tiles)
        tables = {id(rope): DeviceRope(rope, device) for rope in ropes}
        self.rope_tables = list(tables.values())
        self.ropes = [tables[id(rope)] for rope in ropes]
        self._workspace: torch.Tensor | None = None
        self._page_tables: weakref.WeakKeyDictionary[PagedRows, tuple[int, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self.step_executor = StepExecutor(self)

    # -- the forward pass ------------------------------------------------------------------------------

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.config.vocab):
            raise ValueError(f"token ids must lie in 0..{self.config.vocab - 1}")
        rows = torch.empty(len(ids), self.config.hidden, device=self.device)
        if len(ids):
            on_device = ids.to(self.device, torch.int32)
            gather_into(self.weights.embedding, on_device, rows, self.config.embedding_scale, pdl=False)
        return rows

    def attention_inputs(
        self, layer: int, rows: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = self.weights.layers[layer]
        x = self._normed(rows, weights.attn_norm, weights.qkv, rounded=True)
        qkv = self._product(weights.qkv, x)
        return self._rotated(layer, qkv, first, self.config.heads)

    def project_kv(self, layer: int, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.weights.layers[layer]
        x = self._normed(rows, weights.attn_norm, weights.qkv, rounded=True)
        _, k, v = self._rotated(layer, self._product(weights.qkv, x, skip=self.config.q_dim), first, heads=0)
        return k, v

    def _rotated(
        self, layer: int, qkv: torch.Tensor, first: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, weights = self.config, self.weights.layers[layer]
        cos, sin = self.ropes[layer].rows(first, len(qkv))
        return rowops.rope_qkv(
            *(qkv, None, cos, sin, weights.q_norm, weights.k_norm, config.norm_eps),
            *(heads, config.kv_heads, config.head_dim),
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: KvRows,
        first: int,
        q_codes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config, hot = self.config, past.hot
        return attend(
            *(q, k, v, self.page_table(hot), hot.ring or 0, first, past.window or 0),
            *(config.attention_scale, config.attention_softcap or 0.0),
        )

    def append_rows(self, k: torch.Tensor, v: torch.Tensor, past: KvRows, first: int, skip: int) -> None:
        rowops.append_rows(k, v, self.page_table(past.hot), past.hot.ring or 0, first, skip)

    def check_kv_rows(self, rows: Sequence[KvRows]) -> None:
        if not all(each.plain for each in rows):
            raise BackendUnavailable(
                "device 'cuda' attends full-precision rows inside windows; sinks, codes and windows one "
                "after the other need device 'cpu' in this version"
            )

    def turned(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: KvRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        raise BackendUnavailable("device 'cuda' does not attend codes in this version; use device 'cpu'")

    def turned_back(self, out: torch.Tensor, rows: KvRows) -> torch.Tensor:
        raise BackendUnavailable("device 'cuda' does not attend codes in this version; use device 'cpu'")

    def encode(
        self, code: TurboCode, x: torch.Tensor, mean: torch.Tensor | None, codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:  # fmt: skip
        raise BackendUnavailable("device 'cuda' does not code K/V rows in this version; use device 'cpu'")

    def write_rows(self, rows: torch.Tensor, pages: PagedRows, first: int) -> None:
        """Residual rows (n, hidden) float32 of positions first.., into their pages: one launch."""
        skip = max(0, len(rows) - pages.ring) if pages.ring is not None else 0
        pages.reserve(first + skip, first + len(rows))
        rowops.write_rows(rows, self.page_table(pages), pages.ring or 0, first, skip)

    def page_table(self, pages: PagedRows) -> torch.Tensor:
        """The block addresses on the device, copied again whenever they changed."""
        known = self._page_tables.get(pages)
        if known is None or known[0] != pages.version:
            table = pages.table[: max(1, pages.block_count)]
            known = (pages.version, to_device(table, self.device))
            self._page_tables[pages] = known
        return known[1]

    def attention_norm(self, layer: int) -> torch.Tensor:
        return self.weights.layers[layer].attn_norm

    def add_attention_(self, layer: int, rows: torch.Tensor, attended: torch.Tensor) -> None:
        weights = self.weights.layers[layer]
        update = self._product(weights.o, attended)
        rowops.add_normed_(rows, update, weights.post_attn_norm, self.config.norm_eps)

    def ffn_input(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        return rowops.rms_norm(rows, self.weights.layers[layer].ffn_norm, self.config.norm_eps, torch.float32)

    def dense_ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights.layers[layer]
        if len(x) == 1:
            return self._row_ffn(weights, x)
        gate_up = self._product(weights.gate_up, x, glu=True)
        return self._product(weights.down, rowops.gated_act(gate_up, self.config.activation))

    def _row_ffn(self, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        inner = empty_activation(weights.down, self.config.intermediate, self.device)
        before = self._row_activation(weights.gate_up, x)
        weights.gate_up.run(before, Glu(inner, self.config.activation == "gelu_tanh"))
        out = torch.empty(1, self.config.hidden, device=self.device)
        weights.down.run(inner, out[0])
        return out

    def add_ffn_(self, layer: int, rows: torch.Tensor, update: torch.Tensor) -> None:
        rowops.add_normed_(rows, update, self.weights.layers[layer].post_ffn_norm, self.config.norm_eps)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        head, cap = self.weights.head, self.config.final_softcap
        if len(rows) == 1:
            return self._row_logits(rows.to(self.device))
        x = self._normed(rows.to(self.device), self.weights.final_norm, head)
        matrix = head.matrices[0]
        parts = []
        for first in range(0, matrix.rows, _HEAD_ROWS):
            count = min(_HEAD_ROWS, matrix.rows - first)
            weights = self._unpacked_view(head, count)
            unpack_into(matrix, weights, first)
            parts.append(_matmul(x, weights))
        logits = torch.cat(parts, 1)
        return logits if cap is None else torch.tanh(logits.div_(cap)).mul_(cap)

    def _row_logits(self, rows: torch.Tensor) -> torch.Tensor:
        head = self.weights.head
        planes = empty_activation(head, self.config.hidden, self.device)
        norm = Norm(rows[0], None, None, self.weights.final_norm, rows[0], self.config.norm_eps)
        last_norm(norm, torch.empty_like(rows[0]), planes, None, pdl=False)
        logits = torch.empty(1, self.config.vocab, device=self.device)
        best = torch.empty(head.tiles, device=self.device)
        at = torch.empty(head.tiles, dtype=torch.int32, device=self.device)
        head.run(planes, Head(best, at, self.config.final_softcap or 0.0), out=logits[0])
        return logits

    # -- products --------------------------------------------------------------------------------------

    def _normed(
        self, rows: torch.Tensor, weight: torch.Tensor, linear: RowLinear, rounded: bool = False
    ) -> torch.Tensor:
        """The normed rows in the precision that `_product` wants. `rounded`: of the rows as a residual state
        stores them: K/V derived again are then those that were dropped, within the noise floor."""
        exact = len(rows) == 1 or _product_dtype(linear) is torch.float32
        dtype = torch.float32 if exact else torch.bfloat16
        return rowops.rms_norm(rows, weight, self.config.norm_eps, dtype, rounded)

    def _product(self, linear: RowLinear, x: torch.Tensor, glu: bool = False, skip: int = 0) -> torch.Tensor:
        """x (n, columns) times the stack's rows from `skip` on, plus their bias: float32 (n, rows - skip).
        `glu`: columns [gate | up]."""
        if len(x) == 1 and not glu:
            out = torch.empty(1, linear.rows, device=self.device)
            linear.run(self._row_activation(linear, x), out[0])
            return out[:, skip:].contiguous()
        rows = 2 * self.config.intermediate if glu else linear.rows - skip
        weights = self._unpacked_view(linear, rows)
        first = 0
        for matrix in linear.matrices:
            left = max(0, skip - first) if not glu else 0  # rows of this matrix that are not wanted
            wanted = rows if glu else max(0, matrix.rows - left)
            begin = max(0, first - skip)
            if wanted:
                unpack_into(matrix, weights[begin : begin + wanted], left, glu)
            first += matrix.rows
        out = _matmul(x.to(weights.dtype), weights)
        return out if linear.plain_bias is None else out.add_(linear.plain_bias[skip:])

    def _row_activation(self, linear: RowLinear, x: torch.Tensor) -> Planes | torch.Tensor:
        """One row (1, columns) as what the packed kernels read."""
        x = x.float().contiguous()
        if is_float(linear):
            return x[0]
        planes = Planes.empty(linear.columns, linear.bits, self.device, linear.groups)
        quantise_row(x[0], planes, pdl=False)
        return planes

    def _unpacked_view(self, linear: RowLinear, rows: int) -> torch.Tensor:
        """(rows, columns) of the workspace, for one matrix at a time."""
        dtype = _product_dtype(linear)
        needed = rows * linear.columns * dtype.itemsize
        if self._workspace is None or self._workspace.numel() < needed:
            self._workspace = None
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._workspace[:needed].view(dtype).view(rows, linear.columns)

    # -- what it holds ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the step's buffers. Kernels compile when a graph is first captured."""
        self.step_executor.prepare()

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.device.type == "cuda":  # pragma: cuda only
            torch.cuda.synchronize(self.device)

    def workspaces(self) -> dict[str, list[torch.Tensor]]:
        """What every engine on this model shares: the prefill workspace and the step's buffers."""
        return {
            "step buffers": list(self.step_executor.buffers()),
            "unpacked weights": [] if self._workspace is None else [self._workspace],
            "block tables on the device": [table for _, table in self._page_tables.values()],
        }

    def facts(self) -> dict[str, Any]:
        packed = sum(
            isinstance(matrix, PackedMatrix) for item in self.weights.linears for matrix in item.matrices
        )
        return {
            "form": f"stored weights, {self.activations} activations" if packed else "stored weights",
            "kv_dtype": "bfloat16",
            "activations": self.activations,
            "bytes_per_step": self.weights.step_bytes,
            "resident_bytes": self.weights.resident_bytes,
            "converted_tensors": len(self.weights.converted),
            "rope_table_bytes": sum(rope.nbytes for rope in self.rope_tables),
            "scratch_bytes": sum(item.nbytes for items in self.workspaces().values() for item in items),
        }


def to_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small host tensor on the device, without waiting for the device: a copy from memory that is
    not pinned would first let the stream run dry."""
    if device.type == "cpu":
        return table.clone()
    return table.pin_memory().to(device, non_blocking=True)  # pragma: cuda only


def empty_activation(linear: RowLinear, values: int, device: torch.device) -> Planes | torch.Tensor:
    """Zeroed room for the row that `linear` multiplies: planes, or a float32 vector for stored floats."""
    if is_float(linear):
        return torch.zeros(-(-values // 32) * 32, device=device)
    return Planes.empty(values, linear.bits, device, linear.groups)


def _product_dtype(linear: RowLinear) -> torch.dtype:
    """float32 weights are multiplied as they are, all others in bfloat16."""
    matrix = linear.matrices[0]
    stored = torch.bfloat16 if isinstance(matrix, PackedMatrix) else matrix.data.dtype
    return torch.float32 if stored is torch.float32 else torch.bfloat16


def _matmul(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x (n, k) times weights (rows, k) transposed, accumulated and returned in float32."""
    if x.dtype is torch.float32 or not x.is_cuda:
        return x.float() @ weights.float().t()
    return torch.mm(x, weights.t(), out_dtype=torch.float32)
