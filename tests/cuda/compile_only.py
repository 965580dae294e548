"""The CUDA backend without a card: every Triton launch is noted, none runs, and `compile_all` then compiles
what was noted for sm_90, exactly as the launches would have on the card.

Triton's interpreter accepts code that its compiler refuses, so kernels that the interpreter has proved may
still not compile. Tensors are on the CPU: their dtypes, their alignment and the other arguments pick the same
variants as on the card. Whatever kernels should have written holds zeros.

Only for a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that a program may have on Hopper
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoCard:
    """What Triton asks of its driver before it would launch."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Variant:
    """One compilation that a launch asked for."""

    source: Any  # triton.compiler.ASTSource
    options: dict[str, Any]
    scene: str  # what was driven when it was first launched

    @property
    def kernel(self) -> str:
        return self.source.fn.fn.__name__

    @property
    def label(self) -> str:
        """Kernel, constants and launch options that tell the variant from others, and who asked for it."""
        names = self.source.fn.arg_names
        constants = {names[path[0]]: value for path, value in self.source.constants.items()}
        shown = [f"{name}={value}" for name, value in constants.items() if value not in (0, None, False)]
        shown += [f"warps={self.options['num_warps']}"]
        return f"{self.kernel}({' '.join(shown)}) [{self.scene}]"


@dataclass(frozen=True)
class Outcome:
    """What became of a variant; `error` is empty when it compiled."""

    kernel: str
    label: str
    seconds: float
    registers: int = 0
    stack: int = 0  # bytes a thread: what did not fit the registers
    shared: int = 0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"FAILED {self.label}\n{self.error}"
        figures = f"{self.registers:3} registers {self.stack:4} stack {self.shared:6} shared"
        return f"{figures} {self.seconds:5.1f} s  {self.label}"


class Launches:
    """The variants that launches asked for since `install`, each once."""

    def __init__(self) -> None:
        self.scene = ""
        self.variants: dict[tuple[str, str, str], Variant] = {}

    def install(self) -> Launches:
        """From now on nothing is launched or compiled by this process."""
        if os.environ.get("TRITON_INTERPRET"):
            raise RuntimeError("kernels of a process with TRITON_INTERPRET=1 are not those that are compiled")

        def note(
            kernel: JITFunction, key: str, signature: Any, device: Any, constants: Any, options: Any,
            attributes: Any, warmup: bool,
        ) -> None:  # fmt: skip
            source = kernel.ASTSource(kernel, signature, constants, attributes)
            known = (kernel.module, kernel.fn.__name__, key)
            self.variants.setdefault(known, Variant(source, dict(options.__dict__), self.scene))

        driver.set_active(NoCard())  # type: ignore[arg-type]
        JITFunction._do_compile = note  # type: ignore[method-assign]
        empty_is_zero()
        nothing_runs()
        return self


def empty_is_zero() -> None:
    """Nothing runs, so what no host code wrote is zero: finite, and the same every time."""

    def zeros(*size: Any, memory_format: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)

    torch.empty = zeros  # type: ignore[assignment]
    torch.empty_like = torch.zeros_like  # type: ignore[assignment]


def compile_all(variants: list[Variant], workers: int) -> Iterator[Outcome]:
    """Compile in `workers` processes; outcomes in the order of `variants`."""
    context = multiprocessing.get_context("fork")  # sources cannot be pickled: children inherit them
    _INHERITED[:] = variants
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(_compile, range(len(variants)))


_INHERITED: list[Variant] = []


def _compile(index: int) -> Outcome:
    variant = _INHERITED[index]
    begin = time.perf_counter()
    made = functools.partial(Outcome, variant.kernel, variant.label)
    try:
        kernel = triton.compile(variant.source, target=TARGET, options=variant.options)
    except Exception as error:
        return made(time.perf_counter() - begin, error=innermost(error))
    if not four_neighbours(kernel.asm["ttgir"]):
        return made(time.perf_counter() - begin, error="an inline load of four groups is not of neighbours")
    registers, stack = resources(kernel.asm["cubin"])
    return made(time.perf_counter() - begin, registers, stack, kernel.metadata.shared)


def four_neighbours(ir: str) -> bool:
    """Whether every inline load that serves four elements by one address (`load_small`, `load_super`) has a
    layout in which a thread's four are neighbours: the interpreter cannot tell, and the chip would not."""
    sizes = dict(re.findall(r"(#blocked\d*) = #ttg\.blocked<\{sizePerThread = \[([^\]]*)\]", ir))
    used = re.findall(r"packed_element = 4 : i32.*-> tensor<[^,]*, (#blocked\d*)>", ir)
    return all(sizes[name].split(", ")[-1] == "4" for name in used)


def innermost(error: BaseException) -> str:
    """The message of what was wrong. Triton wraps it in one error per call on the way to the kernel."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    messages = [str(item) for item in chain if isinstance(item, CompilationError)][-1:]
    if not any(str(chain[-1]) in message for message in messages):
        messages.append(f"{type(chain[-1]).__name__}: {chain[-1]}")
    return "\n".join(messages)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"no resource usage in {text!r}")
    return int(found[1]), int(found[2])


# -- models without weights ------------------------------------------------------------------------------


def nothing_runs() -> None:
    """Patch what on the host reads results, and what would take time over weights that nobody reads."""
    from larql_kv.backends.cuda import decoder, weights
    from larql_kv.backends.cuda.program import StepBuffers

    def packed_once(raws: Any, device: Any, tile: Any, order: Any, float_tile: Any) -> Any:
        key = tuple((raw.kind, raw.shape) for raw in raws), tile, order is None, float_tile
        if key not in packed:
            packed[key] = pack_rows(raws, device, tile, order, float_tile)
        return packed[key]

    packed: dict[Any, Any] = {}
    pack_rows = weights.pack_rows
    weights.pack_rows = packed_once
    decoder._matmul = lambda x, weights: torch.zeros(len(x), len(weights))
    StepBuffers.landed = lambda self, number, patience: 7  # type: ignore[method-assign]


@dataclass(frozen=True)
class Traits:
    """How a model differs from its `Shape` (model/shape_recipes.py)."""

    without: tuple[str, ...] = ()  # tensors of a layer that it lacks
    biases: tuple[str, ...] = ()  # matrices of a layer that have one
    kinds: dict[str, str] = field(default_factory=dict)  # ggml types by matrix, instead of the mix's
    config: dict[str, Any] = field(default_factory=dict)  # fields of its ModelConfig


def build_model(shape: Any, traits: Traits, activations: str | None = None) -> Any:
    """A model of zeros on the CUDA backend, its tensors on the CPU."""
    from larql_kv.backends.cuda.decoder import CudaDecoder
    from larql_kv.model.load import assemble
    from larql_kv.model.shape_blocks import row_bytes
    from larql_kv.model.shape_models import RandomSource
    from larql_kv.model.tensors import RawTensor
    from larql_kv.model.tokenizer import Tokenizer

    class Zeros(RandomSource):
        def __contains__(self, name: object) -> bool:
            tail = str(name).rsplit(".", 1)[-1]
            biased = tail.removesuffix("_bias") in traits.biases
            return tail not in traits.without and (biased or super().__contains__(name))

        def get(self, name: str) -> RawTensor:
            tail = name.rsplit(".", 1)[-1]
            if tail.endswith("_bias"):
                rows = self.get(name.removesuffix("_bias")).shape[0]
                return RawTensor(name, "F32", (rows,), np.zeros((1, 4 * rows), np.uint8))
            raw = self.file.tensors[self._names[name]]
            kind = traits.kinds.get(tail, raw.kind)
            rows = raw.shape[0] if len(raw.shape) == 2 else 1
            data = np.zeros((rows, row_bytes(kind, raw.shape[-1])), np.uint8)
            return RawTensor(raw.name, kind, raw.shape, data)

    def on_cpu(config: Any, source: Any, ropes: Any) -> CudaDecoder:
        return CudaDecoder(config, source, ropes, torch.device("cpu"), activations)

    source = Zeros(shape)
    source.config = replace(source.config, **traits.config)
    tokenizer = replace(Tokenizer.from_gguf(source.file), stop_ids=frozenset())
    form: Any = SimpleNamespace(decoder=on_cpu)
    return assemble(source.config, source, tokenizer, form, shape.label)
