"""Tokenizers of small files written here: prefixes, special tokens, refusals; transformers as reference."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from larql_kv.errors import ModelError
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.tokenizer import Tokenizer
from larql_kv.model.tokenizer_bpe import PRE_TOKENIZERS
from larql_kv.model.tokenizer_spm import SpecialSplitter
from larql_kv.model.tokenizer_stream import byte_alphabet

from . import gguf_bytes as gb
from .tokenizer_corpus import CORPUS, random_texts

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
WORDS = [
    "▁the",
    "▁",
    "t",
    "h",
    "e",
    "th",
    "he",
    "the",
    "▁t",
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "bc",
    "▁▁",
    "▁▁▁",
    "é",
    "▁a",
]
LAST = ["<tool>", "<tool_call>", "<bos>", "<eos>", "<pad>", "<mask>"]  # the last four: HF's Gemma adds them
LAST_TYPES = [4, 3, 3, 3, 3, 3]
TYPES = [2, 3, 3] + [6] * 256


def llama_file(path: Path, architecture: str = "llama", drop: tuple[str, ...] = (), **changes) -> Path:
    """A SentencePiece file; `changes` replaces a key's bytes, `drop` leaves keys out."""
    pieces = [*PIECES, *WORDS, *LAST]
    keys = {
        "general.architecture": gb.scalar("general.architecture", gb.STR, architecture),
        "model": gb.scalar("tokenizer.ggml.model", gb.STR, "llama"),
        "tokens": gb.array("tokenizer.ggml.tokens", gb.STR, pieces),
        "scores": gb.array("tokenizer.ggml.scores", gb.F32, [-float(i) for i in range(len(pieces))]),
        "types": gb.array("tokenizer.ggml.token_type", gb.I32, [*TYPES, *[1] * len(WORDS), *LAST_TYPES]),
        "bos": gb.scalar("tokenizer.ggml.bos_token_id", gb.U32, 1),
        "eos": gb.scalar("tokenizer.ggml.eos_token_id", gb.U32, 2),
        "unk": gb.scalar("tokenizer.ggml.unknown_token_id", gb.U32, 0),
        **changes,
    }
    path.write_bytes(gb.file([value for key, value in keys.items() if key not in drop]))
    return path


def bpe_file(path: Path, pre: str = "gpt-2", drop: tuple[str, ...] = (), **changes) -> Path:
    """A byte-level file: all bytes, a few merges, two special tokens and a user-defined one."""
    tokens = [*byte_alphabet(), "ab", "Ġab", "Ġt", "Ġth", "he", "12", "123", "ĊĊ", "ĠĠ"]
    merges = ["a b", "Ġ ab", "Ġ t", "Ġt h", "h e", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ"]
    tokens += ["<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<think>"]  # the first is HF's default
    count = len(tokens)
    keys = {
        "general.architecture": gb.scalar("general.architecture", gb.STR, "llama"),
        "model": gb.scalar("tokenizer.ggml.model", gb.STR, "gpt2"),
        "split": gb.scalar("tokenizer.ggml.pre", gb.STR, pre),
        "tokens": gb.array("tokenizer.ggml.tokens", gb.STR, tokens),
        "types": gb.array("tokenizer.ggml.token_type", gb.I32, [1] * (count - 4) + [3, 3, 3, 4]),
        "merges": gb.array("tokenizer.ggml.merges", gb.STR, merges),
        "bos": gb.scalar("tokenizer.ggml.bos_token_id", gb.U32, count - 3),
        "eos": gb.scalar("tokenizer.ggml.eos_token_id", gb.U32, count - 2),
        **changes,
    }
    path.write_bytes(gb.file([value for key, value in keys.items() if key not in drop]))
    return path


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile.open(path))


def reference(path: Path):
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


TEXTS = [
    *CORPUS.values(),
    *random_texts(200, 3),
    "abc the abc",
    "  abc",
    "<s>abc",
    "<tool>a<tool_call> b</s>",
    "▁a",
]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_sentencepiece_equals_transformers(tmp_path, architecture):
    path = llama_file(tmp_path / "x.gguf", architecture)
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    found, vocabulary, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(found, vocabulary)
    ours = load(path)
    assert ours.prefix_ids == (1,)  # the file does not say; llama.cpp and transformers add BOS
    assert ours.encode("abc")[1:] == ours.encode("abc", add_special=False)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, text
        # Phi-3's converter keeps the Strip of the llama decoder, as we do.
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_decoding_of_any_sentencepiece_ids(tmp_path, architecture):
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = llama_file(tmp_path / "x.gguf", architecture)
    found, vocabulary, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(found, vocabulary)
    ours, rng = load(path), random.Random(5)
    stream = ours.stream()  # one for all: a flush must leave it as new
    for _ in range(500):
        # Mostly byte tokens, whole characters among them, so that runs are valid here and broken there.
        ids = [rng.choice((rng.randrange(3, 259), rng.randrange(ours.vocab_size))) for _ in range(6)]
        ids[2:2] = [3 + byte for byte in rng.choice(("é", "日", "😀", "a")).encode()]
        whole = theirs.decode(ids[1:], skip_special_tokens=False)
        assert ours.decode(ids[1:]) == whole
        assert "".join(map(stream.push, ids[1:])) + stream.flush() == whole
    valid = [3 + byte for byte in "日😀".encode()]
    assert ours.decode(valid) == "日😀"


def test_llama3_takes_whole_words_without_merges(tmp_path):
    # "he" needs its merge in GPT-2's rules; Llama 3's tokenizer.json has ignore_merges.
    merges = gb.array("tokenizer.ggml.merges", gb.STR, ["a b"])
    for pre, count in (("gpt-2", 2), ("llama-bpe", 1)):
        ours = load(bpe_file(tmp_path / "x.gguf", pre, merges=merges))
        assert len(ours.encode("he", add_special=False)) == count


def test_the_files_word_on_the_space_prefix_counts(tmp_path):
    plain = load(llama_file(tmp_path / "a.gguf"))
    flag = gb.scalar("tokenizer.ggml.add_space_prefix", gb.BOOL, 0)
    bare = load(llama_file(tmp_path / "b.gguf", flag=flag))
    assert plain.token_text(plain.encode("the", add_special=False)[0]) == " the"
    assert bare.token_text(bare.encode("the", add_special=False)[0]) == "the"
    assert plain.decode(plain.encode("the", add_special=False)) == "the"
    assert bare.decode(bare.encode(" the", add_special=False)) == " the"


def test_bos_and_eos_flags(tmp_path):
    def flags(bos, eos):
        return {
            "b": gb.scalar("tokenizer.ggml.add_bos_token", gb.BOOL, bos),
            "e": gb.scalar("tokenizer.ggml.add_eos_token", gb.BOOL, eos),
        }

    for bos, eos in ((0, 0), (1, 0), (0, 1), (1, 1)):
        ids = load(llama_file(tmp_path / "x.gguf", **flags(bos, eos))).encode("")
        assert ids == [1] * bos + [2] * eos
    with pytest.raises(ModelError, match="names no bos token"):
        load(llama_file(tmp_path / "x.gguf", drop=("bos",), **flags(1, 0)))


def test_byte_level_equals_transformers(tmp_path):
    for pre in ("gpt-2", "llama-bpe", "tekken", "gpt-4o"):
        path = bpe_file(tmp_path / "x.gguf", pre)
        ours, theirs = load(path), reference(path)
        for text in TEXTS:
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, add_special=False) == ids, (pre, text)
            assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_compiles_and_loses_nothing(tmp_path, pre):
    ours = load(bpe_file(tmp_path / "x.gguf", pre))
    for text in TEXTS:
        ids = ours.encode(text, add_special=False)
        expected = text
        if PRE_TOKENIZERS[pre].nfc:
            import unicodedata

            expected = unicodedata.normalize("NFC", text)
        assert ours.decode(ids) == expected


def test_digit_rules(tmp_path):
    def pieces(pre):
        ours = load(bpe_file(tmp_path / "x.gguf", pre))
        return [ours.token_text(index) for index in ours.encode("12 1234", add_special=False)]

    assert pieces("gpt-2") == ["12", " ", "123", "4"]
    assert pieces("smollm") == pieces("qwen2") == list("12 1234")
    assert pieces("llama-bpe") == ["12", " ", "123", "4"]


def test_llama3_adds_bos_unless_the_file_says_no(tmp_path):
    ours = load(bpe_file(tmp_path / "x.gguf", "llama-bpe"))
    assert ours.encode("ab")[0] == ours.bos_id
    assert ours.token_text(ours.bos_id) == "<|begin_of_text|>"
    assert load(bpe_file(tmp_path / "x.gguf", "gpt-2")).prefix_ids == ()
    flag = gb.scalar("tokenizer.ggml.add_bos_token", gb.BOOL, 0)
    assert load(bpe_file(tmp_path / "x.gguf", "llama-bpe", flag=flag)).prefix_ids == ()


def test_stop_ids_of_metadata_and_of_well_known_strings(tmp_path):
    ours = load(bpe_file(tmp_path / "x.gguf", eot=gb.scalar("tokenizer.ggml.eot_token_id", gb.U32, 5)))
    assert ours.stop_ids == {5, ours.eos_id, ours.eos_id - 2}
    texts = {ours.token_text(index) for index in load(bpe_file(tmp_path / "y.gguf", drop=("eos",))).stop_ids}
    assert texts == {"<|eot_id|>", "<|endoftext|>"}
    # </s> as a plain user-defined token (Gemma's HTML tag) does not stop.
    types = gb.array(
        "tokenizer.ggml.token_type", gb.I32, [2, 3, 4, *[6] * 256, *[1] * len(WORDS), *LAST_TYPES]
    )
    ours = load(llama_file(tmp_path / "z.gguf", drop=("eos",), types=types))
    assert {ours.token_text(index) for index in ours.stop_ids} == {"<eos>"}


def test_ids_outside_the_vocabulary(tmp_path):
    for ours in (load(bpe_file(tmp_path / "x.gguf")), load(llama_file(tmp_path / "y.gguf"))):
        assert ours.decode([ours.vocab_size, 10**12]) == ""
        for call in (ours.decode, ours.stream().push):
            with pytest.raises(ModelError, match="negative"):
                call([-1] if call == ours.decode else -1)
        with pytest.raises(ModelError, match="outside the vocabulary"):
            ours.token_text(ours.vocab_size)


def test_fingerprint_follows_vocabulary_and_merges(tmp_path):
    one = load(bpe_file(tmp_path / "x.gguf")).fingerprint
    assert one == load(bpe_file(tmp_path / "y.gguf")).fingerprint
    assert one != load(bpe_file(tmp_path / "y.gguf", "llama-bpe")).fingerprint
    merges = gb.array("tokenizer.ggml.merges", gb.STR, ["a b"])
    assert one != load(bpe_file(tmp_path / "y.gguf", merges=merges)).fingerprint


def test_splitter_takes_the_leftmost_then_the_longest():
    splitter = SpecialSplitter({"\n": 1, "\n\n": 2, "<a>": 3, "<a><b>": 4, "<b>": 5, "a": 6, "": 7})
    assert list(splitter.split("\n\n\n<a><b><a>x<b")) == [2, 1, 4, 3, "x<b"]
    assert list(splitter.split("xax")) == ["x", 6, "x"]
    assert list(SpecialSplitter({}).split("abc")) == ["abc"]
    assert list(SpecialSplitter({"x": 1}).split("")) == []


def _i32(key, items):
    return gb.array(f"tokenizer.ggml.{key}", gb.I32, items)


@pytest.mark.parametrize(
    ("make", "word", "changes"),
    [
        (llama_file, "supported: gpt2, llama", {"model": gb.scalar("tokenizer.ggml.model", gb.STR, "t5")}),
        (llama_file, "lack 'tokenizer.ggml.model'", {"drop": ("model",)}),
        (llama_file, "lack 'tokenizer.ggml.tokens'", {"drop": ("tokens",)}),
        (llama_file, "lack 'tokenizer.ggml.scores'", {"drop": ("scores",)}),
        (llama_file, "scores has 1 entries", {"scores": gb.array("tokenizer.ggml.scores", gb.F32, [1.0])}),
        (llama_file, "token_type has 2 entries", {"types": _i32("token_type", [1, 1])}),
        (llama_file, "empty", {"tokens": gb.array("tokenizer.ggml.tokens", gb.STR, [])}),
        (llama_file, "not UTF-8", {"tokens": gb.array("tokenizer.ggml.tokens", gb.STR, [b"\xff"] * 280)}),
        (llama_file, "expected strings", {"tokens": _i32("tokens", [1, 2])}),
        (llama_file, "bos_token_id is 5000", {"bos": gb.scalar("tokenizer.ggml.bos_token_id", gb.U32, 5000)}),
        (llama_file, "eos_token_id", {"eos": gb.scalar("tokenizer.ggml.eos_token_id", gb.I32, -1)}),
        (
            bpe_file,
            "supported: codeshell, command-r",
            {"split": gb.scalar("tokenizer.ggml.pre", gb.STR, "klingon")},
        ),
        (bpe_file, "lack 'tokenizer.ggml.merges'", {"drop": ("merges",)}),
        (bpe_file, "merge 0", {"merges": gb.array("tokenizer.ggml.merges", gb.STR, ["ab"])}),
        (bpe_file, "do not fit", {"merges": gb.array("tokenizer.ggml.merges", gb.STR, ["zz yy"])}),
        (bpe_file, "outside 0 to 6", {"types": _i32("token_type", [9] * 269)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_vocabularies_are_refused(tmp_path, make, word, changes):
    with pytest.raises(ModelError) as caught:
        load(make(tmp_path / "x.gguf", **changes))
    assert word in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_must_be_finite(tmp_path, bad):
    count = len(PIECES) + len(WORDS) + len(LAST)
    scores = gb.array("tokenizer.ggml.scores", gb.F32, [bad] + [0.0] * (count - 1))
    with pytest.raises(ModelError, match="finite"):
        load(llama_file(tmp_path / "x.gguf", scores=scores))


def test_duplicate_and_empty_tokens_do_not_stop_loading(tmp_path):
    pieces = [*PIECES, *WORDS[:-2], "abc", "", *LAST]
    ours = load(llama_file(tmp_path / "x.gguf", tokens=gb.array("tokenizer.ggml.tokens", gb.STR, pieces)))
    assert ours.vocab_size == len(pieces)
    assert ours.decode(ours.encode("abc the")) == "<s> abc the"


# Directories --------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path) -> Path:
    path = bpe_file(tmp_path / "x.gguf", "llama-bpe")
    where = tmp_path / "hf"
    reference(path).save_pretrained(where)
    return where


def test_directory_config_files(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": True, "chat_template": [{"name": "default", "template": "T"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8, 99999, "x"]}')
    ours = Tokenizer.from_directory(directory)
    assert ours.prefix_ids == (ours.bos_id,)
    assert ours.stop_ids == {7, 8, ours.eos_id, ours.eos_id - 2}
    assert ours.chat_template == "T"
    (directory / "chat_template.jinja").write_text("from the file ☃")
    assert Tokenizer.from_directory(directory).chat_template == "from the file ☃"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.json", b"\xff", "UTF-8"),
        ("tokenizer.json", b"[]", "tokenizer.json"),
        ("tokenizer_config.json", b"{", "no valid JSON"),
        ("tokenizer_config.json", b"[1]", "expected an object"),
        ("generation_config.json", b"[" * 100_000, "no valid JSON"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
    ],
)
def test_broken_directories_are_refused(directory, name, content, word):
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_directory(directory)
    assert word in str(caught.value)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_decoders_that_cannot_be_streamed_are_refused(directory, decoder):
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["decoder"] = decoder
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.from_directory(directory)
