"""One decode step: the buffers it lives in, its launches, and the graph they are captured into."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from larql_kv.backends.cuda import sample
from larql_kv.backends.cuda.attention_step import (
    AttentionScratch,
    attention_step,
    splits_for,
    stages_for,
)
from larql_kv.backends.cuda.decoder import empty_activation, to_device
from larql_kv.backends.cuda.linear import Glu, Head, Norm, RowLinear, last_norm, quantise_row
from larql_kv.backends.cuda.planes import Planes
from larql_kv.backends.cuda.unpack import gather_into
from larql_kv.errors import BackendFailure

if TYPE_CHECKING:
    from larql_kv.backends.cuda.decoder import CudaDecoder
    from larql_kv.backends.cuda.step import StepRun
    from larql_kv.state.base import StepRows

_BLOCK = 64  # rows of a state block
_SLOTS = 4096  # tokens that may have landed and not been read
_HEAD_TILES = 4  # tiles of the head a program walks


class Ending(Enum):
    """What a step does after the last layer."""

    HIDDEN = "hidden"  # nothing: `buffers.hidden` is the result
    GREEDY = "greedy"  # final norm, head, the largest logit
    SAMPLE = "sample"  # ... and a draw by `buffers.sampling`


class StepBuffers:
    """Everything a step reads and writes that is not weights or rows, at fixed addresses."""

    def __init__(self, decoder: CudaDecoder, capacity: int) -> None:
        config, device, weights = decoder.config, decoder.device, decoder.weights
        self._decoder = decoder
        hidden = config.hidden

        def floats(count: int) -> torch.Tensor:
            return torch.zeros(count, device=device)

        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.token = torch.zeros(1, dtype=torch.int32, device=device)
        self.x = (floats(hidden), floats(hidden))  # the residual row: read one, write the other
        self.qkv = floats(config.q_dim + 2 * config.kv_dim)
        self.attended = floats(-(-config.q_dim // 32) * 32)
        self.after_attention, self.after_ffn, self.hidden = floats(hidden), floats(hidden), floats(hidden)
        self._inputs: dict[tuple[str, int, int], Planes | torch.Tensor] = {}
        self.logits = floats(config.vocab)
        self.best = floats(weights.head.tiles)
        self.best_at = torch.zeros(weights.head.tiles, dtype=torch.int32, device=device)
        words = max(linear.scratch_words for layer in weights.layers for linear in (layer.qkv, layer.gate_up))
        self.scratch = torch.zeros(words, dtype=torch.int32, device=device)
        self.sampling = sample.SamplingBuffers.empty(device)
        pinned = device.type == "cuda"
        self._landed = torch.full((_SLOTS,), sample.EMPTY, dtype=torch.int32, pin_memory=pinned)
        self._landed_view = self._landed.numpy()
        self._sequence = torch.zeros(1, dtype=torch.int32, device=device)  # choices made
        self._opened = 0  # choices enqueued
        self._unread: weakref.WeakSet[StepRun] = weakref.WeakSet()
        self._least, self.capacity = capacity, 0
        self.grow(capacity)

    def grow(self, positions: int) -> None:
        """Room for `positions`: tables, RoPE rows and the splits of attention follow the capacity."""
        if positions <= self.capacity:
            return
        config, device = self._decoder.config, self._decoder.device
        capacity = max(self._least, 1 << (positions - 1).bit_length())
        for rope in self._decoder.rope_tables:
            rope.grow(capacity)
        shape = (config.layer_count, capacity // _BLOCK)
        tables = [torch.zeros(shape, dtype=torch.int64, device=place) for place in (device, device, "cpu")]
        splits = splits_for(capacity, config.kv_heads, head_dim=config.head_dim)
        group = config.heads // config.kv_heads
        attention = AttentionScratch.empty(config.kv_heads, group, config.head_dim, splits, device)
        # All or nothing: memory may have run out above.
        self.kv_tables, self.row_tables, self._host_tables = tables
        self.attention, self.capacity = attention, capacity

    def input_of(self, role: str, linear: RowLinear, values: int) -> Planes | torch.Tensor:
        """The quantised row that `linear` multiplies; layers of one layout share it."""
        key = (role, linear.bits, linear.groups)
        if key not in self._inputs:
            self._inputs[key] = empty_activation(linear, values, self._decoder.device)
        return self._inputs[key]

    def upload(self, rows: StepRows) -> None:
        """The block addresses of `rows`, to the device's tables."""
        pairs = [(self.kv_tables, [kv.hot for kv in rows.kv])]
        if rows.residual is not None:
            pairs.append((self.row_tables, rows.residual))
        for table, pages in pairs:
            for layer, paged in enumerate(pages):
                count = min(len(paged.table), self._host_tables.shape[1])
                self._host_tables[layer, :count] = paged.table[:count]
            table.copy_(to_device(self._host_tables, table.device))

    def set_token(self, token: int) -> None:
        self.token.fill_(token)

    def set_position(self, position: int) -> None:
        self.position.fill_(position)

    # -- tokens that the device chose ------------------------------------------------------------------

    def open_choice(self) -> int:
        """The number of the choice that is enqueued next. Slots go round: what lies in those that come now is
        read first."""
        number = self._opened
        if number % (_SLOTS // 2) == 0 and number:
            self.synchronize()  # no step that is still under way may use the slots that come now
            for run in list(self._unread):
                run.collect()
        self._landed_view[number % _SLOTS] = sample.EMPTY
        self._opened += 1
        return number

    def realign(self) -> None:
        """After a step that was given up half-way: count the choices that the device made."""
        self.synchronize()
        self._opened = int(self._sequence)

    def watch(self, run: StepRun) -> None:
        """`run` is asked to collect its tokens before their slots are used again."""
        self._unread.add(run)

    def landed(self, number: int, patience: float) -> int:
        """The token of that choice, waited for without a device call; after `patience` seconds with one.

        Raises BackendFailure when it never comes.
        """
        slot = number % _SLOTS
        deadline = time.perf_counter() + patience
        while (token := int(self._landed_view[slot])) == sample.EMPTY:
            if time.perf_counter() > deadline or self.token.device.type == "cpu":
                self.synchronize()
                token = int(self._landed_view[slot])
                if token == sample.EMPTY:
                    raise BackendFailure("a step ended without its token")
        return token

    def choose(self, ending: Ending, pdl: bool) -> None:
        """The step's last launches: the next token, for the device and for the host."""
        if ending is Ending.SAMPLE:
            self.draw(self.logits)
        else:
            sample.choose_largest(self.best, self.best_at, self.token, self._landed, self._sequence, pdl)

    def draw(self, logits: torch.Tensor) -> None:
        """Draw the token of `position` from logits (vocab,) by `sampling`."""
        sample.draw(logits, self.sampling, self.position, self.token, self._landed, self._sequence)

    def synchronize(self) -> None:
        """Wait for the device. Raises BackendFailure when it reports an error."""
        try:
            self._decoder.synchronize()
        except RuntimeError as error:
            raise BackendFailure(f"the device failed: {error}") from error

    def saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a warm-up run would change, with copies (nothing may be under way). The slot that its choice
        lands in is one of them: the host must not take it for the real one."""
        return [(item, item.clone()) for item in (self.position, self.token, self._sequence, self._landed)]

    def tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor here, for the ledger."""
        seen: dict[int, torch.Tensor] = {}
        for value in vars(self).values():
            for tensor in _tensors(value):
                seen[tensor.data_ptr()] = tensor
        return seen.values()


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


class StepProgram:
    """The launches of one step for one layout of rows, captured on CUDA, launched one by one elsewhere."""

    def __init__(
        self,
        decoder: CudaDecoder,
        buffers: StepBuffers,
        rows: StepRows,
        position: int,
        ending: Ending,
        pdl: bool = True,
        capture: bool = True,
    ) -> None:
        """Captures now (the tables and the position are those of a real step: a warm-up runs on them).

        `capture=False` launches kernel by kernel: what a graph is compared with.
        """
        self._decoder, self._buffers, self._ending, self._pdl = decoder, buffers, ending, pdl
        self._rings = [kv.hot.ring or 0 for kv in rows.kv]
        self._windows = [kv.window or 0 for kv in rows.kv]
        self._keep_rings = None if rows.residual is None else [pages.ring or 0 for pages in rows.residual]
        bridge = rows.bridge
        self._transit = None if bridge is None else bridge.transit  # its buffer's address is in the graph
        self._staging = None if bridge is None else bridge.staging[position & 1]
        self._stages_kv = bridge is not None and bridge.full
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture and decoder.device.type == "cuda":  # pragma: cuda only
            self._capture()

    def _capture(self) -> None:  # pragma: cuda only
        buffers = self._buffers
        torch.cuda.synchronize(self._decoder.device)
        saved = buffers.saved()
        stream = torch.cuda.Stream(self._decoder.device)
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))  # `saved` copied there
        with torch.cuda.stream(stream):
            self.launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.launch()
        torch.cuda.synchronize(self._decoder.device)
        for tensor, value in saved:
            tensor.copy_(value)
        self._graph = graph

    def replay(self) -> None:
        """Run the step on the current stream."""
        if self._graph is None:
            self.launch()
        else:  # pragma: cuda only
            self._graph.replay()

    def launch(self) -> None:
        """Every kernel of the step, in order."""
        buffers, weights = self._buffers, self._decoder.weights
        self.embed()
        now = 0
        update: torch.Tensor | None = None
        post: torch.Tensor | None = None
        for layer, at in enumerate(weights.layers):
            self.qkv(layer, now, update, post)
            self.attention(layer)
            self.o(layer)
            self.gate_up(layer, 1 - now)
            self.down(layer)
            update, post = buffers.after_ffn, at.post_ffn_norm
        self.last_norm(now, update, post)
        if self._ending is not Ending.HIDDEN:
            self.head()
            buffers.choose(self._ending, self._pdl)

    def embed(self) -> None:
        """The token's row into x[0]."""
        buffers, scale = self._buffers, self._decoder.config.embedding_scale
        gather_into(self._decoder.weights.embedding, buffers.token, buffers.x[0][None], scale, self._pdl)

    def qkv(self, layer: int, now: int, update: torch.Tensor | None, post: torch.Tensor | None) -> None:
        """x[now] + update -> x[1 - now], its norm through q, k and v."""
        decoder, buffers = self._decoder, self._buffers
        config, at = decoder.config, decoder.weights.layers[layer]
        staged = None if self._staging is None else self._staging[layer]
        norm = Norm(
            buffers.x[now],
            update,
            post,
            at.attn_norm,
            buffers.x[1 - now],
            config.norm_eps,
            pos=buffers.position,
            keep_table=None if self._keep_rings is None else buffers.row_tables[layer],
            keep_ring=0 if self._keep_rings is None else self._keep_rings[layer],
            stage=None if staged is None else staged[: config.hidden],
            round=True,
        )
        at.qkv.run(norm, buffers.qkv, scratch=buffers.scratch, pdl=self._pdl)

    def attention(self, layer: int) -> None:
        """Append the new K/V row, attend, and leave the result as `o` reads it."""
        decoder, buffers = self._decoder, self._buffers
        config, at = decoder.config, decoder.weights.layers[layer]
        o_input = buffers.input_of("o", at.o, config.q_dim)
        planes = o_input if isinstance(o_input, Planes) else None
        direct = planes is not None and config.head_dim % 32 == 0
        rope = decoder.ropes[layer]
        ring, window = self._rings[layer], self._windows[layer]
        most = min(ring, buffers.capacity) if ring else buffers.capacity
        splits = splits_for(most, config.kv_heads, head_dim=config.head_dim)
        stages = stages_for(most, splits)
        staged = self._staging[layer, config.hidden :] if self._staging is not None else None
        attention_step(
            buffers.qkv,
            buffers.kv_tables[layer],
            buffers.position,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            cos=rope.cos,
            sin=rope.sin,
            q_norm=at.q_norm,
            k_norm=at.k_norm,
            eps=config.norm_eps,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
            ring=ring,
            window=window,
            splits=splits,
            stages=stages,
            warps=8 if stages == 1 else 4,
            partials=buffers.attention,
            planes=planes if direct else None,
            out=None if direct else buffers.attended,
            kv_stage=staged if self._stages_kv else None,
            pdl=self._pdl,
        )
        if planes is not None and not direct:
            quantise_row(buffers.attended[: config.q_dim], planes, self._pdl)

    def o(self, layer: int) -> None:
        """The attention's output projection, into `after_attention`."""
        buffers, at = self._buffers, self._decoder.weights.layers[layer]
        o_input = buffers.input_of("o", at.o, self._decoder.config.q_dim)
        planes = o_input if isinstance(o_input, Planes) else buffers.attended
        at.o.run(planes, buffers.after_attention, pdl=self._pdl)

    def gate_up(self, layer: int, now: int) -> None:
        """x[now] + after_attention -> x[1 - now], its norm through gate and up, activated."""
        config, buffers = self._decoder.config, self._buffers
        at = self._decoder.weights.layers[layer]
        norm = Norm(
            buffers.x[now],
            buffers.after_attention,
            at.post_attn_norm,
            at.ffn_norm,
            buffers.x[1 - now],
            config.norm_eps,
        )
        inner = buffers.input_of("down", at.down, config.intermediate)
        glu = Glu(inner, config.activation == "gelu_tanh")
        at.gate_up.run(norm, glu, scratch=buffers.scratch, pdl=self._pdl)

    def down(self, layer: int) -> None:
        """The FFN's output into `after_ffn`."""
        buffers, at = self._buffers, self._decoder.weights.layers[layer]
        inner = buffers.input_of("down", at.down, self._decoder.config.intermediate)
        at.down.run(inner, buffers.after_ffn, pdl=self._pdl)

    def last_norm(self, now: int, update: torch.Tensor | None, post: torch.Tensor | None) -> None:
        """What leaves the last layer into `hidden`, its norm as the head reads it; the position goes up."""
        buffers, weights, config = self._buffers, self._decoder.weights, self._decoder.config
        norm = Norm(buffers.x[now], update, post, weights.final_norm, buffers.hidden, config.norm_eps)
        head_input = buffers.input_of("head", weights.head, config.hidden)
        last_norm(norm, buffers.hidden, head_input, buffers.position, self._pdl)

    def head(self) -> None:
        """Logits, and the largest of each tile."""
        buffers, weights, config = self._buffers, self._decoder.weights, self._decoder.config
        head_input = buffers.input_of("head", weights.head, config.hidden)
        after = Head(buffers.best, buffers.best_at, config.final_softcap or 0.0)
        weights.head.run(head_input, after, out=buffers.logits, pdl=self._pdl, tiles_each=_HEAD_TILES)
