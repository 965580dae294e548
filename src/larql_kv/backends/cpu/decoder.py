"""The decoder's arithmetic on the CPU, over the packed kernels of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from larql_kv.backends.cpu import ops
from larql_kv.backends.cpu.row_steps import LayerWeights, RotaryRows, RowSteps, is_row
from larql_kv.backends.cpu.runtime import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from larql_kv.codec.turbo import TurboCode
    from larql_kv.model.config import ModelConfig
    from larql_kv.model.rope import RopeTable
    from larql_kv.model.tensors import TensorSource
    from larql_kv.state.kv_rows import KvRows


class CpuDecoder:
    """`exact=True`: every linear is row-invariant float32 arithmetic on the stored weights, K/V and rows are
    float32. Otherwise prefill multiplies in bfloat16 and K/V and rows are bfloat16; decode and the K/V
    projection keep float32 arithmetic.
    """

    name = "cpu"

    def __init__(
        self, config: ModelConfig, source: TensorSource, ropes: Sequence[RopeTable], exact: bool
    ) -> None:
        self.config = config
        self.exact = exact
        self.device = torch.device("cpu")
        self.kv_dtype = torch.float32 if exact else torch.bfloat16
        self._source = source  # keeps the file mapped: embeddings are read from it row by row
        self._embedding = ops.EmbeddingTable(source.get("embed"))
        self._final_norm = self._required("final_norm")
        self._head = ops.pack_linear([source.get("embed" if config.tied else "head")], gemm_bf16=False)
        self._ropes = {id(rope): rope for rope in ropes}  # layers share tables
        self._layers = [self._load_layer(index, rope) for index, rope in enumerate(ropes)]
        rotary = {key: RotaryRows(rope) for key, rope in self._ropes.items()}
        self._row_steps = [
            RowSteps(config, weights, rotary[id(weights.rope)], exact) for weights in self._layers
        ]
        self._row_attention = ops.RowAttention(
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.attention_scale,
            config.attention_softcap,
        )
        # Values of one row, by which a call for one row is known: see `row_steps`.
        self._hidden, self._q_dim, self._kv_dim = config.hidden, config.q_dim, config.kv_dim

    def _load_layer(self, index: int, rope: RopeTable) -> LayerWeights:
        prefix = f"layers.{index}."
        fast = not self.exact
        return LayerWeights(
            attn_norm=self._required(prefix + "attn_norm"),
            q=self._linear(prefix, ("q",), fast),
            kv=self._linear(prefix, ("k", "v"), False),
            o=self._linear(prefix, ("o",), fast),
            ffn_norm=self._required(prefix + "ffn_norm"),
            gate_up=self._linear(prefix, ("gate", "up"), fast),
            down=self._linear(prefix, ("down",), fast),
            q_norm=self._vector(prefix + "q_norm"),
            k_norm=self._vector(prefix + "k_norm"),
            post_attn_norm=self._vector(prefix + "post_attn_norm"),
            post_ffn_norm=self._vector(prefix + "post_ffn_norm"),
            rope=rope,
        )

    def _linear(self, prefix: str, names: tuple[str, ...], gemm_bf16: bool) -> ops.PackedLinear:
        raws = [self._source.get(prefix + name) for name in names]
        linear = ops.pack_linear(raws, gemm_bf16=gemm_bf16)
        biases = [self._vector(f"{prefix}{name}_bias") for name in names]
        if any(bias is not None for bias in biases):
            linear.bias = torch.cat(
                [
                    torch.zeros(raw.shape[0]) if bias is None else bias
                    for raw, bias in zip(raws, biases, strict=True)
                ]
            )
        return linear

    def _required(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._source.get(name).dequantize().copy())

    def _vector(self, name: str) -> torch.Tensor | None:
        return self._required(name) if name in self._source else None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.rows(ids, self.config.embedding_scale)

    def attention_inputs(
        self, layer: int, rows: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if is_row(rows, self._hidden):
            return self._row_steps[layer].inputs(rows, first)
        weights = self._layers[layer]
        x = self._attention_norm(weights, rows)
        q = weights.q(x).view(-1, self.config.heads, self.config.head_dim)
        return q, *self._rotated(weights, x, q, first)

    def project_kv(self, layer: int, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._layers[layer]
        no_queries = torch.empty(len(rows), 0, self.config.head_dim)
        return self._rotated(weights, self._attention_norm(weights, rows), no_queries, first)

    def _attention_norm(self, weights: LayerWeights, rows: torch.Tensor) -> torch.Tensor:
        """The normed attention input of rows as a residual state stores them (bfloat16 unless exact)."""
        return ops.rms_norm(rows, weights.attn_norm, self.config.norm_eps, not self.exact)

    def _rotated(
        self, weights: LayerWeights, x: torch.Tensor, q: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of normed rows `x` in K/V precision; norms and rotates q in place on the way."""
        config = self.config
        k, v = weights.kv(x, invariant=True).view(-1, 2, config.kv_heads, config.head_dim).unbind(1)
        k, v = k.contiguous(), v.contiguous()
        cos, sin = weights.rope.rows(first, len(x))
        ops.rope_qk_(q, k, cos, sin, weights.q_norm, weights.k_norm, config.norm_eps)
        if not self.exact:
            ops.round_bf16_(k)
            ops.round_bf16_(v)
        return k, v

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: KvRows,
        first: int,
        q_codes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        store, seen = self._store(past), (past.start, past.sinks)
        if is_row(q, self._q_dim) and is_row(k, self._kv_dim) and is_row(v, self._kv_dim):
            return self._row_attention.attend(q, k, v, store, first, past.window, *seen, q_codes)
        config = self.config
        return ops.attend(
            *(q, k, v, store, first, past.window, config.attention_scale, config.attention_softcap),
            *(*seen, q_codes),
        )

    def append_rows(self, k: torch.Tensor, v: torch.Tensor, past: KvRows, first: int, skip: int) -> None:
        store = self._store(past)
        if not skip and is_row(k, self._kv_dim) and is_row(v, self._kv_dim):
            self._row_attention.append(k, v, store, first)
            return
        ops.append_rows(k, v, store, first, skip)

    def _store(self, rows: KvRows) -> ops.KvStore:
        """The kernels' description of a layer's rows, made again whenever their blocks changed."""
        version = rows.version
        if rows.view is None or rows.view[0] != version:
            store = ops.KvStore(rows.hot.table, rows.hot.ring or 0, not self.exact)
            if rows.sink_pages is not None:
                store.set_sinks(rows.kept_sinks, rows.sink_pages.table)
            if rows.code is not None and rows.code_pages is not None:
                pages = rows.code_pages
                store.set_codes(pages.table, pages.ring or 0, rows.code.k, rows.code.v)
            rows.view = (version, store)
        store = rows.view[1]
        if rows.code is not None:
            store.set_coded(rows.coded)
        return store

    def check_kv_rows(self, rows: Sequence[KvRows]) -> None:
        return  # every form has its kernel

    def turned(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: KvRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        assert rows.code is not None
        q, q_codes, k, v = ops.turn(q, k, v, rows.code.k, rows.scale)
        if not self.exact:
            ops.round_bf16_(k)
            ops.round_bf16_(v)
        return q, q_codes, k, v

    def turned_back(self, out: torch.Tensor, rows: KvRows) -> torch.Tensor:
        assert rows.code is not None
        ops.rotate_(rows.code.v, out.view(len(out), -1, self.config.head_dim))
        return out

    def encode(
        self, code: TurboCode, x: torch.Tensor, mean: torch.Tensor | None, codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:  # fmt: skip
        ops.encode_into(code, x.transpose(0, 1), codes.transpose(0, 1), scales.transpose(0, 1), mean)

    def attention_norm(self, layer: int) -> torch.Tensor:
        return self._layers[layer].attn_norm

    def add_attention_(self, layer: int, rows: torch.Tensor, attended: torch.Tensor) -> None:
        if is_row(rows, self._hidden) and is_row(attended, self._q_dim):
            self._row_steps[layer].add_attention_(rows, attended)
            return
        weights = self._layers[layer]
        ops.add_normed_(rows, weights.o(attended), weights.post_attn_norm, self.config.norm_eps)

    def ffn_input(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        if is_row(rows, self._hidden):
            return self._row_steps[layer].ffn_input(rows)
        return ops.rms_norm(rows, self._layers[layer].ffn_norm, self.config.norm_eps)

    def dense_ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if is_row(x, self._hidden):
            return self._row_steps[layer].ffn(x)
        weights = self._layers[layer]
        return weights.down(ops.gated_act(weights.gate_up(x), self.config.activation))

    def add_ffn_(self, layer: int, rows: torch.Tensor, update: torch.Tensor) -> None:
        if is_row(rows, self._hidden) and is_row(update, self._hidden):
            self._row_steps[layer].add_ffn_(rows, update)
            return
        ops.add_normed_(rows, update, self._layers[layer].post_ffn_norm, self.config.norm_eps)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        x = ops.rms_norm(rows, self._final_norm, self.config.norm_eps)
        logits = self._head(x, invariant=True)
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits.div_(cap)).mul_(cap)

    def prepare(self) -> None:
        """Make every execution form ahead of the first prefill."""
        for layer in self._layers:
            for linear in (layer.q, layer.o, layer.gate_up, layer.down):
                linear.prepare_gemm()

    def facts(self) -> dict[str, Any]:
        linears = [
            linear
            for layer in self._layers
            for linear in (layer.q, layer.kv, layer.o, layer.gate_up, layer.down)
        ]
        linears.append(self._head)
        return {
            "form": "float32" if self.exact else "float32 decode, bfloat16 prefill",
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "bytes_per_step": sum(linear.nbytes for linear in linears),
            "resident_bytes": sum(linear.resident_bytes for linear in linears),
            "rope_table_bytes": sum(rope.nbytes for rope in self._ropes.values()),
            "scratch_bytes": scratch_bytes(),  # of the calling thread; grows with the context
        }
