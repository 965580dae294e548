"""Which tiles the packed matrices of a decode step should have on this card.

    PYTHONPATH=src python benchmarks/micro/cuda_tune.py --shape gemma3-4b [--roles qkv,o]

Whole captured steps are timed, one role's tile changed at a time (its matrices repacked from random
weights), and the best of each role is kept for the next. Prints microseconds a step for every candidate.
`--shape gemma3-4b:bf16` tunes the tiles of floats. Processes compile the kernels first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from larql_kv.backends.cuda import program
from larql_kv.backends.cuda.formats import PAIR
from larql_kv.backends.cuda.linear import RowLinear
from larql_kv.backends.cuda.packed import FloatMatrix, FloatTile, PackedMatrix, Tile
from larql_kv.backends.cuda.program import Ending, StepProgram
from larql_kv.engine import build_engine
from larql_kv.model.shape_models import parse_shape, random_model
from larql_kv.model.shape_recipes import Shape

Numbers = tuple[int, ...]  # of a Tile; for attention: warps
CANDIDATES: dict[str, list[Numbers]] = {
    "gate_up": [
        (64, 16, 4, 2, 168), (64, 16, 4, 1), (64, 16, 4, 1, 128), (64, 16, 8, 1, 80),
    ],
    "down@Q6_K": [(8, 64, 4, 3), (8, 64, 4, 2), (8, 64, 4, 5, 168), (8, 64, 4, 4), (16, 64, 8, 2)],
    "down@Q4_K": [(8, 64, 4, 3), (8, 64, 4, 2), (8, 64, 4, 4), (8, 64, 4, 5), (16, 64, 8, 3)],
    "qkv": [
        (32, 16, 4, 5), (32, 16, 4, 3), (64, 16, 8, 5), (64, 16, 8, 3), (64, 16, 8, 2), (64, 16, 4, 2),
    ],
    "o": [(8, 64, 4, 1), (16, 64, 8, 1), (16, 32, 4, 2), (8, 64, 4, 0)],
    "head": [(64, 16, 4, 0), (128, 16, 4, 0)],
    "attention": [(4,), (8,)],
}  # fmt: skip

FLOAT_CANDIDATES: dict[str, list[Numbers]] = {
    "gate_up": [(16, 512, 8, 4), (64, 128, 8, 4), (16, 512, 8, 2)],
    "down": [(4, 2048, 8, 3), (8, 1024, 8, 4)],
    "qkv": [(8, 512, 4, 4), (16, 512, 8, 4), (8, 1024, 8, 2)],
    "o": [(8, 1024, 8, 2), (4, 1024, 8, 2), (4, 1024, 4, 2)],
    "head": [(16, 512, 4, 5), (16, 512, 8, 4), (8, 1024, 8, 2), (8, 512, 4, 5)],
}  # fmt: skip


def repacked(linear: RowLinear, numbers: Numbers) -> RowLinear:
    """The same sizes and formats in another tile, with random codes; floats stay as they are."""
    if isinstance(linear.matrices[0], FloatMatrix):
        floats = [FloatMatrix(matrix.data, FloatTile(*numbers)) for matrix in linear.matrices]
        return RowLinear(floats, linear.bias, linear.bits, linear.plain_bias)
    tile = Tile(*numbers)
    matrices = [_random(matrix, tile) for matrix in linear.matrices if isinstance(matrix, PackedMatrix)]
    return RowLinear(matrices, linear.bias, linear.bits, linear.plain_bias)


def _random(like: PackedMatrix, tile: Tile) -> PackedMatrix:
    groups, device = like.columns // 32, like.codes.device
    tall, wide = -(-like.rows // tile.rows), -(-groups // tile.groups)
    codes = torch.randint(
        -(1 << 31), (1 << 31) - 1, (tall, wide, like.fmt.code_bits, tile.rows, tile.groups), device=device,
        dtype=torch.int32,
    )  # fmt: skip
    shape = (tall, wide, tile.rows, tile.groups)
    half = (torch.rand(shape, device=device) * 0.02 + 0.01) / like.columns**0.5
    supers = None
    if like.fmt.has_super:
        small = torch.randint(257, 258 * 40, shape, device=device, dtype=torch.int16) & 0x3F3F
        narrow = half[..., : tile.groups // 8].half().view(torch.int16).to(torch.int32) & 0xFFFF
        supers = narrow | (narrow << 16)
    elif like.fmt.scale == PAIR:
        small = half.half().view(torch.int16).to(torch.int32) & 0xFFFF
    else:
        small = half.half().view(torch.int16)
    return PackedMatrix(like.fmt, tile, like.rows, like.columns, codes, small, supers)


ATTENTION = program.attention_step


class Bench:
    def __init__(self, shape: Shape, prompt_tokens: int, activations: str | None) -> None:
        self.model = random_model(shape, "cuda", activations=activations)
        self.decoder = self.model.decoder
        self.engine = build_engine("standard", self.model)
        ids = torch.randint(10, self.model.config.vocab - 10, (prompt_tokens,)).tolist()
        self.engine.prefill(ids)
        for token in self.engine.decode_ahead(4, 11):
            assert token >= 0
        self.position = self.engine.length
        self.rows = self.engine._state.step_rows()

    def microseconds(self, replays: int = 40, repeats: int = 5) -> float:
        executor, weights = self.decoder.step_executor, self.decoder.weights
        buffers = executor._require_buffers()
        words = max(item.scratch_words for layer in weights.layers for item in (layer.qkv, layer.gate_up))
        if buffers.scratch.numel() < words:
            buffers.scratch = torch.zeros(words, dtype=torch.int32, device=self.decoder.device)
        tiles = weights.head.tiles
        buffers.best = torch.zeros(tiles, device=self.decoder.device)
        buffers.best_at = torch.zeros(tiles, dtype=torch.int32, device=self.decoder.device)
        buffers._inputs.clear()
        executor.forget()
        buffers.set_position(self.position)
        step = StepProgram(self.decoder, buffers, self.rows, self.position, Ending.GREEDY)
        times = []
        for _ in range(repeats):
            buffers.set_position(self.position)
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                step.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / replays)
        return statistics.median(times)

    def use(self, role: str, numbers: Numbers) -> None:
        """Run with this tile (or, for attention, this many warps) from now on."""
        weights = self.decoder.weights
        if role == "attention":
            program.attention_step = functools.partial(ATTENTION, warps=numbers[0])
            return
        if role == "head":
            weights.head = repacked(weights.head, numbers)
            return
        role, _, kind = role.partition("@")
        weights.layers = [
            dataclasses.replace(layer, **{role: repacked(getattr(layer, role), numbers)})
            if not kind or getattr(layer, role).matrices[0].fmt.kind == kind
            else layer
            for layer in weights.layers
        ]


def compile_all(processes: int) -> None:
    """Fill Triton's cache: this command again, as many processes, each with its share of the candidates."""
    command = [sys.executable, *sys.argv, "--share"]
    shares = [subprocess.Popen([*command, f"{share}/{processes}"]) for share in range(processes)]
    for process in shares:
        process.wait()


def compile_share(shape: Shape, given: argparse.Namespace, listed: Sequence[tuple[str, Numbers]]) -> None:
    first, step = map(int, given.share.split("/"))
    bench = Bench(shape, given.prompt_tokens, given.activations)
    for role, numbers in listed[first::step]:
        with contextlib.suppress(Exception):  # reported when its turn comes
            bench.use(role, numbers)
            bench.microseconds(1, 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--shape", default="gemma3-4b")
    options.add_argument("--roles", default=",".join([*CANDIDATES, "down"]))
    options.add_argument("--prompt-tokens", type=int, default=512)
    options.add_argument("--activations", default=None)
    options.add_argument(
        "--seconds", type=float, default=240.0, help="stop starting new candidates after this"
    )
    options.add_argument("--processes", type=int, default=12, help="that compile first; 0: none")
    options.add_argument("--share", help=argparse.SUPPRESS)  # I/N: every N-th candidate from the I-th
    options.add_argument("--no-attention", action="store_true", help="leave attention out of the timed steps")
    given = options.parse_args()
    if given.no_attention:
        program.attention_step = lambda *rows, **settings: None
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA card")
    begin = time.perf_counter()
    shape = parse_shape(given.shape)
    candidates = FLOAT_CANDIDATES if shape.mix in ("bf16", "f16") else CANDIDATES
    roles = [role for role in given.roles.split(",") if role in candidates]
    if given.share is not None:
        compile_share(replace(shape, layers=1), given, [(r, c) for r in roles for c in candidates[r]])
        return
    if given.processes:
        compile_all(given.processes)
    print(f"compiled in {time.perf_counter() - begin:.1f} s")
    bench = Bench(shape, given.prompt_tokens, given.activations)
    print(f"ready after {time.perf_counter() - begin:.1f} s; {bench.microseconds():.1f} us a step as it is")
    best: dict[str, Numbers] = {}
    for role in roles:
        results: dict[Numbers, float] = {}
        for candidate in candidates[role]:
            if time.perf_counter() - begin > given.seconds:
                continue
            try:
                bench.use(role, candidate)
                results[candidate] = bench.microseconds()
                print(f"  {role:8s} {candidate!s:18s} {results[candidate]:8.1f} us", flush=True)
            except Exception as error:  # a tile that does not compile or fit is a result, too
                print(f"  {role:8s} {candidate!s:18s} {type(error).__name__}: {str(error)[:120]}", flush=True)
        if results:
            best[role] = min(results, key=results.__getitem__)
            bench.use(role, best[role])
    final = bench.microseconds()
    print(f"best {best} -> {final:.1f} us a step, {1e6 / final:.1f} tok/s")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "tune.json").write_text(
            json.dumps({"best": {role: list(item) for role, item in best.items()}, "us": final})
        )


if __name__ == "__main__":
    main()
