"""The codec kernels compile for sm_90, as test_compiles.py says it for the others.

`python -m tests.cuda.test_codec_compiles` compiles and reports.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT = 200  # seconds
MOST_STACK = 32  # bytes a thread that the kernel of a vector may spill


def test_every_codec_kernel_compiles_for_the_card() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.cuda.test_codec_compiles"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def drive() -> None:
    """Every kernel at sizes of real models: heads of 64, 80 and 256, rows of 576 and 2560."""
    import torch

    from larql_kv.backends.cuda import codec
    from larql_kv.codec import row_codec
    from larql_kv.codec.turbo import TurboCode

    for dim, bits, is_rotated in ((64, 3, True), (80, 4, True), (256, 4, False)):
        code = TurboCode(bits, "lloyd", dim)
        x, mean = torch.zeros(3, 2, dim, dtype=torch.bfloat16), torch.zeros(2, dim)
        codes, scales = torch.zeros(3, 2, code.code_bytes, dtype=torch.uint8), torch.zeros(3, 2)
        codec.encode_into(code, x, codes, scales, mean if dim == 80 else None, is_rotated)
        codec.decode(code, codes, scales, mean if dim == 80 else None)
        codec.rotate(code, x[:, 0].contiguous())
    for name, width in (
        ("int8", 576),
        ("int4", 2560),
        ("int8-clip3", 576),
        ("turbo3", 576),
        ("turbo4", 2560),
    ):
        rows, weight = torch.zeros(3, width), torch.ones(width)
        coded = codec.encode_rows(row_codec(name), rows, weight)
        codec.decode_rows(row_codec(name), coded, width, weight)


def fault(variant: Any, outcome: Any) -> str:
    """What is wrong with a compiled variant; empty when nothing is."""
    import triton

    from tests.cuda.compile_only import SHARED_BYTES, TARGET

    if outcome.error:
        return outcome.error
    if outcome.shared > SHARED_BYTES:
        return f"{outcome.shared} bytes of shared memory"
    if outcome.stack > MOST_STACK and outcome.kernel in ("encode_kernel", "decode_kernel", "rotate_kernel"):
        return f"{outcome.stack} bytes of stack a thread"
    # Every rounding is part of the format: nothing fused, nothing approximate, no small number cut to 0.
    code = triton.compile(variant.source, target=TARGET, options=variant.options).asm["ptx"]  # from the cache
    found = re.findall(r"\b(?:fma\S*f32|\S+\.approx\S*|\S+\.full\S*|\S+\.ftz\S*)", code)
    return f"instructions of other bits: {sorted(set(found))}" if found else ""


def main() -> int:
    """Drive, compile, print a line a variant; the exit code."""
    from tests.cuda.compile_only import Launches, compile_all

    launches = Launches().install()
    launches.scene = "codec"
    drive()
    variants = list(launches.variants.values())
    bad = 0
    for variant, outcome in zip(variants, compile_all(variants, len(os.sched_getaffinity(0))), strict=True):
        wrong = fault(variant, outcome)
        print(outcome, wrong, flush=True)
        bad += bool(wrong)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
