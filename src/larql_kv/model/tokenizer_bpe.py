"""The GGUF tokenizer kind `gpt2`: byte-level BPE, and how each family splits text before the merges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from larql_kv.errors import ModelError
from larql_kv.model.tokenizer_stream import byte_alphabet

CONTROL, USER_DEFINED = 3, 4

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _SYMBOLS + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _SYMBOLS + _TAIL
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek LLM: cased letters (Georgian's small letters were caseless when the model was made).
_DEEPSEEK_LLM = [
    r"[\r\n]",
    "\\s?[[\\p{Lu}\\p{Ll}\\p{Lt}]&&[^\u10d0-\u10ff]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
    r"\p{N}+",
]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"]
_DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
]


@dataclass(frozen=True)
class PreTokenizer:
    """How a family splits: regexes one after another, then GPT-2's own unless `gpt2` is False."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False  # every digit alone, before GPT-2's regex
    falcon: bool = False
    nfc: bool = False  # the model's own tokenizer normalises to NFC
    bos: bool = False  # adds BOS when the file does not say
    ignore_merges: bool = False  # a word that is a token is taken whole


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer(gpt2=True, digits=True)
_L3 = PreTokenizer((_LLAMA3,), bos=True, ignore_merges=True)
_Q2 = PreTokenizer((_QWEN2,), nfc=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "roberta-bpe"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _L3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Q2),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("tekken", "mistral-bpe"), PreTokenizer((_TEKKEN,), bos=True, ignore_merges=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "deepseek-llm": PreTokenizer(tuple(_DEEPSEEK_LLM)),
    "deepseek-coder": PreTokenizer(tuple(_DEEPSEEK_CODER)),
    "deepseek-v3": PreTokenizer(tuple(_DEEPSEEK_V3)),
    "falcon": PreTokenizer(falcon=True),
}


def pre_tokenizer(kind: str) -> PreTokenizer:
    """The rules of a `tokenizer.ggml.pre`. Raises ModelError for one that is not known."""
    try:
        return PRE_TOKENIZERS[kind]
    except KeyError:
        raise ModelError(
            f"tokenizer.ggml.pre is {kind[:100]!r}, which is not supported; "
            f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None


class TokenizersEncoder:
    """Text -> ids by a `tokenizers.Tokenizer`, without the tokens that its post-processor would add."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def build(
    tokens: list[str], merges: list[str], types: np.ndarray, rules: PreTokenizer, special: set[int]
) -> Any:
    """A `tokenizers.Tokenizer` of a file's vocabulary and merges.

    Raises ModelError for a merge that is no pair, or that needs a token which the vocabulary lacks.
    """
    from tokenizers import AddedToken, Tokenizer, models

    whole = np.isin(types, (CONTROL, USER_DEFINED)) if len(types) else np.zeros(len(tokens), bool)
    vocab = {text: index for index, text in enumerate(_spelled(tokens, whole))}
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelError(f"merge {index} is {merge[:80]!r}, expected two tokens with a space between")
        pairs.append((left, right))
    try:
        model = models.BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=rules.ignore_merges)
        tokenizer = Tokenizer(model)
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(f"the file's vocabulary and merges do not fit: {error}") from error
    _set_pre_tokenizer(tokenizer, rules)
    added = [
        AddedToken(tokens[index], normalized=False, special=index in special)
        for index in sorted({*np.nonzero(whole)[0].tolist(), *special})
        if tokens[index] in vocab
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _spelled(tokens: list[str], whole: np.ndarray) -> list[str]:
    """Normal tokens in the byte alphabet. Files hold some as plain text; special ones stay as they are."""
    byte_to_char = {byte: char for char, byte in byte_alphabet().items()}
    foreign = re.compile("[^" + re.escape("".join(byte_alphabet())) + "]").search
    return [
        token if keep or not foreign(token) else "".join(byte_to_char[byte] for byte in token.encode())
        for token, keep in zip(tokens, whole.tolist(), strict=True)
    ]


def _set_pre_tokenizer(tokenizer: Any, rules: PreTokenizer) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    steps: list[Any] = []
    if rules.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.splits]
    if rules.falcon:
        steps.append(pre_tokenizers.Punctuation(behavior="contiguous"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.gpt2 or rules.falcon))
    if rules.falcon:
        steps.append(pre_tokenizers.Digits(individual_digits=False))
        steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
