"""Opens mutated GGUF files until the time is up; run by test_gguf_fuzz.py in a process of its own.

Anything but success or ModelError, a case over two seconds, or memory beyond 8 x the file + 64 MB ends the
process with a report. The first argument is the seed, the second the seconds, the third a directory.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from larql_kv.errors import ModelError
from larql_kv.model.catalog import resolve
from larql_kv.model.config_gguf import config_from_gguf
from larql_kv.model.gguf_file import GgufArray, GgufFile
from larql_kv.model.gguf_source import GgufSource
from larql_kv.model.tokenizer import Tokenizer
from tests.model import gguf_bytes as gb

CASE_SECONDS = 2.0
NUMBERS = (0, 1, 7, 8, 9, 12, 13, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61 + 1, 2**62)
NUMBERS += (2**63 - 1, 2**63, 2**63 + 1, 2**64 - 32, 2**64 - 1)
REAL = ("smollm2-135m", "gemma3-270m")


def tokenizer_files() -> list[bytes]:
    """Small but whole tokenizers of both kinds, so that mutations reach the code behind the reader."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "<x>",
    ]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
    llama = [
        gb.ARCH,
        gb.scalar("tokenizer.ggml.model", gb.STR, "llama"),
        gb.array("tokenizer.ggml.tokens", gb.STR, pieces),
        gb.array("tokenizer.ggml.scores", gb.F32, [-float(i) for i in range(len(pieces))]),
        gb.array("tokenizer.ggml.token_type", gb.I32, types),
        gb.scalar("tokenizer.ggml.bos_token_id", gb.U32, 1),
        gb.scalar("tokenizer.ggml.eos_token_id", gb.U32, 2),
        gb.scalar("tokenizer.ggml.add_bos_token", gb.BOOL, 1),
    ]
    tokens = ["<|endoftext|>", *map(chr, range(33, 127)), "Ġ", "ab", "Ġab"]
    bpe = [
        gb.ARCH,
        gb.scalar("tokenizer.ggml.model", gb.STR, "gpt2"),
        gb.scalar("tokenizer.ggml.pre", gb.STR, "llama-bpe"),
        gb.array("tokenizer.ggml.tokens", gb.STR, tokens),
        gb.array("tokenizer.ggml.token_type", gb.I32, [3] + [1] * (len(tokens) - 1)),
        gb.array("tokenizer.ggml.merges", gb.STR, ["a b", "Ġ ab"]),
        gb.scalar("tokenizer.ggml.bos_token_id", gb.U32, 0),
        gb.scalar("tokenizer.ggml.eos_token_id", gb.U32, 0),
    ]
    return [gb.file(llama), gb.file(bpe)]


def exercise(path: Path, tokenize: bool) -> str:
    """One case; returns what happened. Anything but ModelError passes through."""
    try:
        file = GgufFile.open(path)
        file.describe()
        for value in file.metadata.values():
            if isinstance(value, GgufArray) and len(value) < 10_000:
                value.tolist()
        for tensor in file.tensors.values():
            if tensor.nbytes:
                int(tensor.data[0, 0]), int(tensor.data[-1, -1])
        model(file)
        if tokenize:
            tokenizer = Tokenizer.from_gguf(file)
            ids = tokenizer.encode("ab <x> é<s>\0ab  <|endoftext|>")
            tokenizer.decode([*ids, 0, tokenizer.vocab_size - 1])
    except ModelError:
        return "refused"
    return "opened"


def model(file: GgufFile) -> None:
    """What loading asks of the header beyond the tensors: config, names and shapes."""
    try:
        source = GgufSource(file, config_from_gguf(file))
        for name in ("embed", "final_norm", "layers.0.q", "layers.0.k"):
            source.get(name)
    except ModelError:
        return


def mutate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    out = bytearray(data)
    gentle = rng.random() < 0.4  # stays readable more often, and so reaches the code behind the reader
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.choice((0, 8)) if gentle else rng.randrange(9)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind in (2, 3):
            width = rng.choice((4, 8, 8))
            number = rng.choice(NUMBERS) & (1 << 8 * width) - 1
            out[at : at + width] = number.to_bytes(width, "little")
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            size = rng.randrange(1, 40)
            out[at:at] = out[rng.randrange(len(out)) :][:size] if out else b"\0"
        elif kind == 6:
            del out[at : at + rng.randrange(1, 40)]
        elif kind == 8 and out:
            out[at] = rng.choice(b"abe <>|0x\x01\x02\x03\x04\x06")
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other)) if other else 0
            out[at:] = other[start:]
    return bytes(out)


class RealHeader:
    """A real file's header before a sparse tail; mutated in place and restored, so nothing is copied."""

    def __init__(self, origin: Path, directory: Path) -> None:
        source = GgufFile.open(origin)
        self.size, self.length = source.size, source.data_offset
        with source.path.open("rb") as file:
            self.header = file.read(self.length)
        self.path = directory / f"copy-of-{origin.name}"
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)
        # Where the structure is: the first keys and, after the long vocabulary, the tensor entries.
        self.hot = [(0, min(2000, self.length)), (max(0, self.length - 60_000), self.length)]

    def case(self, rng: random.Random) -> bytes:
        low, high = rng.choice([*self.hot, (0, self.length)])
        at = rng.randrange(max(low, 0), high - 8)
        new = struct.pack("<Q", rng.choice(NUMBERS))[: rng.choice((1, 4, 8))]
        if rng.random() < 0.3:
            new = bytes([self.header[at] ^ 1 << rng.randrange(8)])
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(new)
        return struct.pack("<Q", at) + new

    def restore(self, case: bytes) -> None:
        at = struct.unpack_from("<Q", case)[0]
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(self.header[at : at + len(case) - 8])


def limit_memory(file_size: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + 8 * file_size + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY))


def watched(path: Path, size: int, case: bytes, tokenize: bool) -> str:
    """`exercise` under the limits; on a finding writes the case beside the file and ends the process."""
    limit_memory(size)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    start = time.monotonic()
    try:
        outcome = exercise(path, tokenize)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return outcome
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found = path.parent / "finding.gguf"
        found.write_bytes(case)
        print(f"FOUND {type(error).__name__} after {time.monotonic() - start:.2f} s, case in {found}")
        print("hex of its start:", case[:3000].hex())
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        raise SystemExit(1) from error


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"a case took more than {CASE_SECONDS} s")


def main(seed: int, seconds: float, directory: Path) -> None:
    rng = random.Random(seed)
    signal.signal(signal.SIGALRM, _too_slow)
    whole = [gb.good(), *tokenizer_files()]
    seeds = whole + [make() for make, _ in gb.BAD.values()]
    small = directory / "case.gguf"
    for data in whole:  # must open: else nothing behind the first check would be fuzzed
        small.write_bytes(data)
        assert exercise(small, tokenize=data is not whole[0]) == "opened"
    real: list[RealHeader] = []
    for name in REAL:
        try:
            real.append(RealHeader(resolve(name), directory))
        except ModelError as error:
            print(f"without {name}: {error}")
    # Tiny models of other families, written by the test: whole configs in small headers.
    real += [RealHeader(path, directory) for path in sorted(directory.glob("tiny-*.gguf"))]
    for header in real:
        assert exercise(header.path, tokenize=True) == "opened"
    counts: dict[str, int] = {}
    for data in seeds:
        small.write_bytes(data)
        watched(small, len(data), data, True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(60):
            base = rng.choice(whole) if rng.random() < 0.6 else rng.choice(seeds)
            data = mutate(base, rng, seeds)
            small.write_bytes(data)
            outcome = watched(small, len(data), data, tokenize=rng.random() < 0.7)
            counts[outcome] = counts.get(outcome, 0) + 1
        for header in real:
            case = header.case(rng)
            outcome = "real " + watched(header.path, header.size, case, tokenize=rng.random() < 0.3)
            header.restore(case)
            counts[outcome] = counts.get(outcome, 0) + 1
    print("cases:", counts)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
