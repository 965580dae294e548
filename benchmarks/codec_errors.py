"""What each codec costs on real rows, and how fast the CPU kernels of turbo codes are.

    python benchmarks/codec_errors.py [--models smollm2-135m,gemma3-270m] [--codecs int8,int4] [--tokens 512]

Every residual row of every layer is coded (no window), and K/V come from the decoded rows: the worst that
`markov-rs-codec` can meet. KL is against the same prefill without a codec, in nats a token; `plain` without
channel weights, `weighted` with those of the layer's input norm. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import MODELS

import larql_kv as lk
from larql_kv.backends.cpu import turbo
from larql_kv.bench.text import text_ids
from larql_kv.codec import RowCodec, TurboCode, channel_weights, codec_names, row_codec
from larql_kv.model.model import Model

NAMES = [name for name in codec_names() if row_codec(name).name == name]  # no aliases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="none: only the times")
    parser.add_argument("--codecs", default=",".join(NAMES))
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.models != "none":
        for name in arguments.models.split(","):
            errors(lk.load_model(name, dtype="float32"), name, arguments.codecs.split(","), arguments.tokens)
    times()


def errors(model: Model, name: str, codecs: list[str], tokens: int) -> None:
    ids = text_ids(model, tokens)
    expected, rows = _run(model, ids, None, False)
    print(f"{name}, {len(ids)} tokens, {len(rows)} layers of {model.config.hidden} channels")
    print("codec       bytes  bits    error plain/weighted    KL plain    weighted   top-1 plain/weighted")
    for codec in map(row_codec, codecs):
        size = codec.bytes_per_row(model.config.hidden)
        line = f"{codec.name:<11} {size:5} {8 * size / model.config.hidden:5.2f}"
        figures = []
        for is_weighted in (False, True):
            got, _ = _run(model, ids, codec, is_weighted)
            kl, same = _compared(model, expected, got)
            rms = [
                codec.measure(rows[layer], _weight(model, layer) if is_weighted else None).rms
                for layer in list(rows)[1::4]
            ]
            figures.append((sum(rms) / len(rms), kl, same))
        (e0, kl0, same0), (e1, kl1, same1) = figures
        print(
            f"{line}   {e0:8.5f} / {e1:8.5f}   {kl0:9.2e} / {kl1:9.2e}   {same0:.1%} / {same1:.1%}",
            flush=True,
        )


def _weight(model: Model, layer: int) -> torch.Tensor:
    return channel_weights(model.decoder.attention_norm(layer))


def _compared(model: Model, expected: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """(mean KL, share of equal top-1) of the logits of two sets of final rows."""
    kl, same = 0.0, 0.0
    for first in range(0, len(expected), 64):  # logits of a large vocabulary, a piece at a time
        p, q = (
            torch.log_softmax(model.logits(rows[first : first + 64]).double(), -1) for rows in (expected, got)
        )
        kl += float((p.exp() * (p - q)).sum(-1).clamp_min(0).sum())
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
    return kl / len(expected), same / len(expected)


def _run(
    model: Model, ids: list[int], codec: RowCodec | None, is_weighted: bool
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """(final rows, rows that entered each layer)."""
    decoder: Any = model.decoder
    plain, rows = decoder.attention_inputs, {}

    def attention_inputs(layer: int, hidden: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
        rows[layer] = hidden.clone()
        q, k, v = plain(layer, hidden, first)
        if codec is not None:
            weight = _weight(model, layer) if is_weighted else None
            decoded = codec.decode(codec.encode(hidden, weight), hidden.shape[1], weight)
            _, k, v = plain(layer, decoded, first)
        return q, k, v

    decoder.attention_inputs = attention_inputs
    try:
        final = lk.build_engine("standard", model).prefill_rows(ids)
    finally:
        del decoder.attention_inputs
    return final, rows


def times() -> None:
    """Of the CPU kernels of turbo codes, and of row codecs in torch."""
    torch.set_num_threads(1)
    print("turbo, 64 vectors:  dim  bits   decode ns a value   encode ns a vector   rotate ns a vector")
    for dim in (64, 128, 256):
        for bits in (4, 3, 2):
            code, x = TurboCode(bits, "lloyd", dim), torch.randn(64, 1, dim)
            codes, scales = torch.empty(64, 1, code.code_bytes, dtype=torch.uint8), torch.empty(64, 1)
            encode = _seconds(functools.partial(turbo.encode_into, code, x, codes, scales)) / 64
            rotate = _seconds(functools.partial(turbo.rotate_, code, x)) / 64
            many, many_scales = codes[:, 0].repeat(8, 1), scales[:, 0].repeat(8)
            decode = _seconds(functools.partial(turbo.decode_rows, code, many, many_scales)) / (512 * dim)
            print(f"{dim:23} {bits:5} {1e9 * decode:15.3f} {1e9 * encode:18.0f} {1e9 * rotate:18.0f}")
    rows = torch.randn(64, 576)
    print("rows, 64 of 576 in torch: encode, decode us")
    for name in NAMES:
        codec = row_codec(name)
        coded = codec.encode(rows)
        encode = _seconds(functools.partial(codec.encode, rows))
        decode = _seconds(functools.partial(codec.decode, coded, 576))
        print(f"{name:<11} {1e6 * encode:8.0f} {1e6 * decode:8.0f}")


def _seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Fewest CPU seconds of a call, over repeats of about 20 ms."""
    work()
    calls, best = 1, float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        for _ in range(calls):
            work()
        spent = time.thread_time() - begin
        best = min(best, spent / calls)
        calls = max(1, int(0.02 / best))
    return best


if __name__ == "__main__":
    main()
