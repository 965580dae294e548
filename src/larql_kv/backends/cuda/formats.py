"""Packed weight formats on CUDA: what a group of 32 weights is made of, and how files' blocks become it.

A row is cut into groups of 32 weights. Of each group there are

    codes   4, 5, 6 or 8 int32 words. Word k < 4, byte b: low nibble = code of element 4k + b, high nibble
            = element 16 + 4k + b. 5-bit codes add a word of fifth bits (byte b, bit k: element 4k + b;
            bit 4 + k: element 16 + 4k + b), 6-bit codes two words of upper bits (word 4 + k // 2, byte b,
            from bit 4 (k % 2): two bits of element 4k + b, two of element 16 + 4k + b). 8-bit codes are
            signed bytes in order.
    small   int16, or for `pair` int32
    super   int32, one for 8 groups (K-quants only)

and, by scale mode, weight = d*(q - zero)           `half`  small = d (float16)
                             = d*q + m              `pair`  small = d, m (float16 each, d low)
                             = (d*sc)*q - dmin*mn   `k`     small = sc | mn << 8, super = d, dmin
                             = (d*sc[e // 16])*(q - 32)  `k16`  small = sc0, sc1 (int8), super = d

so a weight is the file's own number: no scale is rounded. Sources of the block layouts: ggml-common.h and
ggml-quants.c of ggml (the routines of the `gguf` package are the reference in the tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HALF, PAIR, SUPER, SUPER16 = 0, 1, 2, 3  # scale modes


@dataclass(frozen=True)
class PackFormat:
    """One ggml type in the packed form. `zero` is the code of weight 0 in the mode `half`."""

    kind: str
    code_bits: int
    scale: int
    zero: int = 0
    block: int = 32  # elements of a file block
    block_bytes: int = 0

    @property
    def has_super(self) -> bool:
        return self.scale in (SUPER, SUPER16)


FORMATS = {
    item.kind: item
    for item in (
        PackFormat("Q4_0", 4, HALF, 8, 32, 18),
        PackFormat("Q4_1", 4, PAIR, 0, 32, 20),
        PackFormat("Q5_0", 5, HALF, 16, 32, 22),
        PackFormat("Q5_1", 5, PAIR, 0, 32, 24),
        PackFormat("Q8_0", 8, HALF, 0, 32, 34),
        PackFormat("Q4_K", 4, SUPER, 0, 256, 144),
        PackFormat("Q5_K", 5, SUPER, 0, 256, 176),
        PackFormat("Q6_K", 6, SUPER16, 0, 256, 210),
    )
}


@dataclass(frozen=True)
class Groups:
    """Rows of one matrix by groups: the file's numbers, unpacked. Tensors on one device."""

    codes: torch.Tensor  # uint8 (rows, groups, 32); int8 bits for 8-bit codes
    small: torch.Tensor  # int16 (rows, groups), or int32 for `pair`
    super: torch.Tensor | None  # int32 (rows, groups / 8)


def unpack_blocks(fmt: PackFormat, raw: torch.Tensor) -> Groups:
    """File blocks, uint8 (rows, row_bytes), as groups."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, fmt.block_bytes)
    return _UNPACKERS[fmt.kind](blocks)


def _words(fields: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, blocks, n bytes) -> (rows, blocks) of one n-byte number each."""
    return fields.contiguous().view(dtype)[..., 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(..., 16) bytes -> (..., 32): all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """(..., 4) bytes -> (..., 32) bits, lowest first."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(b: torch.Tensor) -> Groups:
    return Groups(_nibbles(b[..., 2:18]), _words(b[..., :2], torch.int16), None)


def _q4_1(b: torch.Tensor) -> Groups:
    return Groups(_nibbles(b[..., 4:20]), _words(b[..., :4], torch.int32), None)


def _q5_0(b: torch.Tensor) -> Groups:
    codes = _nibbles(b[..., 6:22]) | (_bits(b[..., 2:6]) << 4)
    return Groups(codes, _words(b[..., :2], torch.int16), None)


def _q5_1(b: torch.Tensor) -> Groups:
    codes = _nibbles(b[..., 8:24]) | (_bits(b[..., 4:8]) << 4)
    return Groups(codes, _words(b[..., :4], torch.int32), None)


def _q8_0(b: torch.Tensor) -> Groups:
    return Groups(b[..., 2:34].contiguous(), _words(b[..., :2], torch.int16), None)


def _k_scales(s: torch.Tensor) -> torch.Tensor:
    """12 bytes of 6-bit scales and mins -> int16 sc | mn << 8, (rows, blocks, 8)."""
    low = s[..., :4].to(torch.int16)
    mid = s[..., 4:8].to(torch.int16)
    high = s[..., 8:12].to(torch.int16)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), -1)
    mins = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), -1)
    return scales | (mins << 8)


def _k_nibbles(qs: torch.Tensor) -> torch.Tensor:
    """128 bytes of a super-block -> codes (rows, blocks, 8, 32): each 32 bytes hold two groups."""
    chunks = qs.unflatten(-1, (4, 32))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3, -2)


def _q4_k(b: torch.Tensor) -> Groups:
    codes = _k_nibbles(b[..., 16:144])
    return Groups(codes.flatten(1, 2), _k_scales(b[..., 4:16]).flatten(1), _words(b[..., :4], torch.int32))


def _q5_k(b: torch.Tensor) -> Groups:
    shifts = torch.arange(8, device=b.device, dtype=torch.uint8)[:, None]
    fifth = (b[..., None, 16:48] >> shifts) & 1
    codes = _k_nibbles(b[..., 48:176]) | (fifth << 4)
    return Groups(codes.flatten(1, 2), _k_scales(b[..., 4:16]).flatten(1), _words(b[..., :4], torch.int32))


def _q6_k(b: torch.Tensor) -> Groups:
    low = b[..., :128].unflatten(-1, (2, 2, 32))  # half, quarter pair, byte
    high = b[..., 128:192].unflatten(-1, (2, 32))
    quarters = torch.cat((low & 15, low >> 4), -2)  # half, quarter of 32, element
    shifts = torch.arange(0, 8, 2, device=b.device, dtype=torch.uint8)[:, None]
    codes = quarters | (((high[..., None, :] >> shifts) & 3) << 4)
    scales = b[..., 192:208].contiguous().view(torch.int16)
    d = _words(b[..., 208:210], torch.int16).to(torch.int32) & 0xFFFF
    return Groups(codes.flatten(1, 3), scales.flatten(1), d)


_UNPACKERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def code_words(fmt: PackFormat, codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 (rows, groups, 32) -> int32 words (rows, groups, fmt.code_bits)."""
    if fmt.code_bits == 8:
        return codes.contiguous().view(torch.int32)
    halves = codes.unflatten(-1, (2, 4, 4))  # half, k, byte
    low, high = halves[..., 0, :, :], halves[..., 1, :, :]
    parts = [(low & 15) | ((high & 15) << 4)]
    if fmt.code_bits == 5:
        k = torch.arange(4, device=codes.device, dtype=torch.uint8)[:, None]
        fifth = ((low >> 4) << k) | ((high >> 4) << (k + 4))
        parts.append(fifth.sum(-2, keepdim=True, dtype=torch.uint8))
    if fmt.code_bits == 6:
        pairs = (low >> 4) | ((high >> 4) << 2)
        parts.append(pairs[..., 0::2, :] | (pairs[..., 1::2, :] << 4))
    return torch.cat(parts, -2).contiguous().view(torch.int32).flatten(-2)
