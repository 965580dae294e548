"""16-lane float32 vectors for numba: an LLVM emitter and the intrinsics built on it.

Microkernels are written as LLVM IR with Python as the macro language, because numba's own loop vectoriser
neither keeps a reduction order nor blocks registers. Addresses are int64. Without AVX512, LLVM splits a
vector into what the machine has. No fast-math flag is ever set: a fused multiply-add happens exactly where
`fma` stands, so the bits do not depend on the optimiser.
"""

# coverage: compiled (most of this file runs inside numba's compiler, and not at all when its cache is warm)
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

LANES = 16
F32, F16, I8, I16, I32, I64 = (
    ir.FloatType(),
    ir.HalfType(),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
)
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_V_BOOL = ir.VectorType(ir.IntType(1), LANES)

Value = Any  # an llvmlite value


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator, untyped: the result lacks the first parameter (the typing context)."""
    return extending.intrinsic(function)


@functools.cache
def has_avx512() -> bool:
    """Whether numba generates code for a machine with AVX512F (it may be told of another CPU)."""
    from numba.core.registry import cpu_target

    context: Any = cpu_target.target_context
    features = context.codegen()._tm_features
    return "+avx512f" in features.split(",")


class Emit:
    """Emits vector IR at a builder's position. `off` arguments are byte offsets (int or i64 value)."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    # --- scalars and control -------------------------------------------------------------------------
    def i64(self, n: int) -> Value:
        return ir.Constant(I64, n)

    def plus(self, a: Value, b: Value | int) -> Value:
        return self.b.add(a, self.i64(b) if isinstance(b, int) else b)

    def times(self, a: Value, b: Value | int) -> Value:
        return self.b.mul(a, self.i64(b) if isinstance(b, int) else b)

    def var(self, init: Value) -> Any:
        """A mutable variable (an alloca that LLVM turns into a register)."""
        slot = cgutils.alloca_once(self.b, init.type)
        self.b.store(init, slot)
        return slot

    def get(self, slot: Any) -> Value:
        return self.b.load(slot)

    def set(self, slot: Any, value: Value) -> None:
        self.b.store(value, slot)

    @contextlib.contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """for index in range(count)"""
        with cgutils.for_range(self.b, count, intp=I64) as loop:
            yield loop.index

    # --- loads and stores ----------------------------------------------------------------------------
    def _load(self, addr: Value, element: Any, off: Value | int, size: int) -> Value:
        pointer = self.b.inttoptr(self.plus(addr, off), ir.VectorType(element, LANES).as_pointer())
        return self.b.load(pointer, align=size)

    def load(self, addr: Value, off: Value | int = 0) -> Value:
        return self._load(addr, F32, off, 4)

    def load_f16(self, addr: Value, off: Value | int = 0) -> Value:
        return self.b.fpext(self._load(addr, F16, off, 2), VF)

    def load_bf16(self, addr: Value, off: Value | int = 0) -> Value:
        wide = self.b.zext(self._load(addr, I16, off, 2), VI)
        return self.b.bitcast(self.b.shl(wide, self.ints(16)), VF)

    def load_i8(self, addr: Value, off: Value | int = 0) -> Value:
        return self.b.sitofp(self.b.sext(self._load(addr, I8, off, 1), VI), VF)

    def load_u8(self, addr: Value, off: Value | int = 0) -> Value:
        # Signed conversion: the values are below 2^31, and it is one instruction everywhere.
        return self.b.sitofp(self.b.zext(self._load(addr, I8, off, 1), VI), VF)

    def load_words(self, addr: Value, off: Value | int = 0) -> Value:
        return self._load(addr, I32, off, 4)

    def nibble(self, words: Value, index: int) -> Value:
        """Nibble `index` (0..7) of every 32-bit word, as float32."""
        low = self.b.lshr(words, self.ints(4 * index)) if index else words
        if has_avx512():  # a table look-up by the low 4 bits replaces mask and conversion
            kind = ir.FunctionType(VF, [VF, VI])
            name = "llvm.x86.avx512.permvar.sf.512"
            table = ir.Constant(VF, [float(q) for q in range(16)])
            return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), [table, low])
        return self.b.sitofp(self.b.and_(low, self.ints(15)) if index < 7 else low, VF)

    def splat_load(self, addr: Value, off: Value | int = 0) -> Value:
        return self.splat(self.b.load(self.b.inttoptr(self.plus(addr, off), F32.as_pointer()), align=4))

    def store(self, addr: Value, v: Value, off: Value | int = 0) -> None:
        self.b.store(v, self.b.inttoptr(self.plus(addr, off), VF.as_pointer()), align=4)

    def store_bf16(self, addr: Value, v: Value, mask: Value | None = None) -> None:
        """Round to nearest even and store 16 bf16 values."""
        bits = self.b.lshr(self.b.bitcast(self.round_bf16(v), VI), self.ints(16))
        halves = self.b.trunc(bits, ir.VectorType(I16, LANES))
        pointer = self.b.inttoptr(addr, halves.type.as_pointer())
        if mask is None:
            self.b.store(halves, pointer, align=2)
        else:
            self._masked_store("v16i16", halves, pointer, mask, 2)

    def load_masked(self, addr: Value, mask: Value) -> Value:
        """Lanes outside the mask are zero and their memory is not touched."""
        pointer = self.b.inttoptr(addr, VF.as_pointer())
        kind = ir.FunctionType(VF, [pointer.type, I32, _V_BOOL, VF])
        name = "llvm.masked.load.v16f32.p0"
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        return self.b.call(function, [pointer, ir.Constant(I32, 4), mask, self.const(0.0)])

    def store_masked(self, addr: Value, v: Value, mask: Value) -> None:
        self._masked_store("v16f32", v, self.b.inttoptr(addr, VF.as_pointer()), mask, 4)

    def _masked_store(self, suffix: str, v: Value, pointer: Value, mask: Value, align: int) -> None:
        kind = ir.FunctionType(ir.VoidType(), [v.type, pointer.type, I32, _V_BOOL])
        function = cgutils.get_or_insert_function(self.b.module, kind, f"llvm.masked.store.{suffix}.p0")
        self.b.call(function, [v, pointer, ir.Constant(I32, align), mask])

    def mask_below(self, count: Value) -> Value:
        """Lanes whose index is below `count` (i64)."""
        return self.b.icmp_signed("<", self.iota(), self.splat_int(self.b.trunc(count, I32)))

    # --- arithmetic ----------------------------------------------------------------------------------
    def const(self, value: float) -> Value:
        return ir.Constant(VF, [float(value)] * LANES)

    def ints(self, value: int) -> Value:
        return ir.Constant(VI, [value] * LANES)

    def iota(self) -> Value:
        return ir.Constant(VI, list(range(LANES)))

    def _splat(self, scalar: Value, vector: Any) -> Value:
        one = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), self.ints(0))

    def splat(self, scalar: Value) -> Value:
        return self._splat(scalar, VF)

    def splat_int(self, scalar: Value) -> Value:
        return self._splat(scalar, VI)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        kind = ir.FunctionType(VF, [VF] * 3)
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, "llvm.fma.v16f32"), [x, y, z])

    def add(self, x: Value, y: Value) -> Value:
        return self.b.fadd(x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.b.fsub(x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.fmul(x, y)

    def div(self, x: Value, y: Value) -> Value:
        return self.b.fdiv(x, y)

    def neg(self, x: Value) -> Value:
        return self.b.fneg(x)

    def less(self, x: Value, y: Value) -> Value:
        return self.b.fcmp_ordered("<", x, y)

    def pick(self, condition: Value, x: Value, y: Value) -> Value:
        return self.b.select(condition, x, y)

    def max(self, x: Value, y: Value) -> Value:
        return self.pick(self.less(x, y), y, x)

    def min(self, x: Value, y: Value) -> Value:
        return self.pick(self.less(y, x), y, x)

    def abs(self, x: Value) -> Value:
        return self.b.bitcast(self.b.and_(self.b.bitcast(x, VI), self.ints(0x7FFFFFFF)), VF)

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def fold(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Scalar: lanes combined by halves (l with l+8, +4, +2, +1)."""
        for step in (8, 4, 2, 1):
            x = combine(x, self.shuffle(x, x, [(lane + step) % LANES for lane in range(LANES)]))
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def round_bf16(self, x: Value) -> Value:
        """The nearest bf16 value (ties to even) in float32; NaN stays NaN."""
        bits = self.b.bitcast(x, VI)
        odd = self.b.and_(self.b.lshr(bits, self.ints(16)), self.ints(1))
        rounded = self.b.add(bits, self.b.add(odd, self.ints(0x7FFF)))
        is_nan = self.b.fcmp_unordered("uno", x, x)
        kept = self.b.select(is_nan, self.b.or_(bits, self.ints(0x400000)), rounded)
        return self.b.bitcast(self.b.and_(kept, self.ints(0xFFFF0000 - (1 << 32))), VF)


def outlined(
    builder: Any, name: str, arg_types: Sequence[Any], body: Callable[..., Value | None], ret: Any
) -> Any:
    """A function of this module with the given body (made once). Kept out of line, so that each microkernel
    is
    optimised and given registers by itself."""
    module = builder.module
    full_name = "larql." + name
    with contextlib.suppress(KeyError):
        return module.get_global(full_name)
    function = ir.Function(module, ir.FunctionType(ret, list(arg_types)), full_name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    result = body(Emit(inner), *function.args)
    inner.ret_void() if result is None else inner.ret(result)
    return function


def void_op(body: Callable[..., None], count: int, floats: int = 0) -> tuple[Any, Any]:
    """(signature, codegen) of an intrinsic of `count` int64 then `floats` float32 arguments; body(emit,
    *args)."""
    signature = types.void(*[types.int64] * count, *[types.float32] * floats)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        body(Emit(builder), *args)
        return context.get_dummy_value()

    return signature, codegen


def _peek(llvm_type: Any, numba_type: Any, extend: str | None) -> tuple[Any, Any]:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        size = 4 if llvm_type == F32 else llvm_type.width // 8 if isinstance(llvm_type, ir.IntType) else 2
        value = builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()), align=min(size, 1))
        return getattr(builder, extend)(value, F32 if extend == "fpext" else I64) if extend else value

    return numba_type(types.int64), codegen


@intrinsic
def peek_u8(_typing, addr):
    return _peek(I8, types.int64, "zext")


@intrinsic
def peek_i8(_typing, addr):
    return _peek(I8, types.int64, "sext")


@intrinsic
def peek_u16(_typing, addr):
    return _peek(I16, types.int64, "zext")


@intrinsic
def peek_u32(_typing, addr):
    return _peek(I32, types.int64, "zext")


@intrinsic
def peek_i64(_typing, addr):
    return _peek(I64, types.int64, None)


@intrinsic
def peek_f16(_typing, addr):
    return _peek(F16, types.float32, "fpext")


@intrinsic
def peek_f32(_typing, addr):
    return _peek(F32, types.float32, None)


def _poke(llvm_type: Any) -> tuple[Any, Any]:
    value_type = types.float32 if llvm_type == F32 else types.int64

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = (
            args[1]
            if llvm_type == F32
            else builder.trunc(args[1], llvm_type)
            if llvm_type != I64
            else args[1]
        )
        builder.store(value, builder.inttoptr(args[0], llvm_type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value_type), codegen


@intrinsic
def poke_8(_typing, addr, value):
    return _poke(I8)


@intrinsic
def poke_16(_typing, addr, value):
    return _poke(I16)


@intrinsic
def poke_32(_typing, addr, value):
    return _poke(I32)


@intrinsic
def poke_f32(_typing, addr, value):
    return _poke(F32)


@intrinsic
def round_bf16_bits(_typing, value):
    """The 16 bits (as int64) of the bf16 nearest to a float32, ties to even; for numbers, not NaN."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
        return builder.zext(builder.lshr(rounded, ir.Constant(I32, 16)), I64)

    return types.int64(types.float32), codegen
