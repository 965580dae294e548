"""Text that tokenizers have been known to disagree on, and a seeded generator of more."""

from __future__ import annotations

import random

CORPUS: dict[str, str] = {
    "empty": "",
    "space": " ",
    "spaces": "a  b   c    d" + " " * 40 + "e",
    "many_spaces": " " * 70,
    "leading": "  Hello, world! ",
    "english": "The quick brown fox can't jump; it's LAZY, isn't it? I'd say we'll've won.",
    "digits": "In 1984, 3.14159 + 12345678901234567890 = 007 ½ ² ٣٤٥ ४५६ １２３",
    "digit_spaces": "1 12 123 1234 12345 1,234,567.89 0x1F 1e-9 v2.0.1",
    "tabs_newlines": "a\tb\t\tc\n\nd\r\n\te\n\n\n\n\nf \n g\x0b\x0c\x85\u2028\u2029h",
    "newline_run": "\n" * 70 + "x" + "\t" * 40,
    "controls": "nul:\x00 bell:\x07 esc:\x1b[31m del:\x7f c1:\x9f",
    "bom": "\ufeffbyte order mark \ufeff inside",
    "zero_width": "zero\u200bwidth\u200d join\u2060er \u00ad soft\u00adhyphen \u202eright\u202c",
    "nfc_nfd": "caf\u00e9 cafe\u0301 \u1e9b\u0323 \u212b \ufb01 \uac00 \u1100\u1161",
    "emoji": "👩‍👩‍👧‍👦 🤷🏽‍♀️ 🏳️‍🌈 🇩🇪🇫🇷 1️⃣ ❤️ 😀😀😀 🫠 🧑‍🚀",
    "cjk": "日本語のテキスト。中文测试，漢字かな交じり文！한국어 문장입니다. ㄱㄴㄷ",
    "arabic": "مرحبا بالعالم، كيف حالُكَ؟ ١٢٣ ﷺ",
    "hebrew": "שלום עולם! מַה שְּׁלוֹמֵךְ?",
    "hindi": "नमस्ते दुनिया! क्षत्रिय कृपया १२३",
    "thai": "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "cyrillic": "Привет, мир! Ёжик в тумане. Ґанок",
    "greek": "Γειά σου Κόσμε! ὦ ἄνδρες Ἀθηναῖοι",
    "european": "Grüße, naïve façade — „Zitat“ «guillemets» ¿qué? ¡sí! Łódź ŽŠČ ßẞ",
    "old_scripts": "𒀀𒀁 𓀀𓀁 𐎀 ᚠᚢᚦ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 \U0010fffd \ue000",
    "maths": "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β ≤ ∞ ∑∏√ ≠ ± × ÷",
    "code": 'def f(x: int) -> str:\n    """Doc."""\n\tif x >= 10 and not x % 2:\n        return f"{x!r:>{8}}"\n',  # noqa: E501
    "json": '{"a": [1, 2.5e-3, null, true], "b": {"c\\n": "\\u00e9"}}',
    "html": "<p class='x'>a &amp; b</p><br/></s><b>bold</b><h1>t</h1><table><tr><td>",
    "url": "https://example.org/path?q=a%20b&x=1#frag user@example.com C:\\dir\\file.txt",
    "specials": "<|im_start|>user\nhi<|im_end|>\n<bos><eos><pad><unk><s></s><mask>"
    "<start_of_turn>model\nok<end_of_turn><|endoftext|>x<start_of_image><unused5>[multimodal]",
    "special_edges": " <|im_end|> <|im_end|><|im_end|>  <end_of_turn>\n\n<end_of_turn> a<bos>b <bo s> <<bos>>",  # noqa: E501
    "almost_special": "<|im_start <|im_end| |> <|endoftext> <end_of_turn <unused99999> <0x41> <0xE2>",
    "visible_space": "a▁b ▁▁ c▁▁▁ Ġtoken Ċ Ã© ▁",
    "long_word": "a" * 500 + "Pneumonoultramicroscopicsilicovolcanoconiosis" * 10,
    "repeat": "ha" * 200 + "!" * 200 + "=" * 150 + "-" * 130 + "." * 60 + "abcabc" * 30,
    "mixed_case": "iPhone XMLHttpRequest snake_case kebab-case SCREAMING_CASE ÀÉÎõü ǅ",
    "quotes": "‘single’ “double” 'can''t' \"\"\" ``` `code` ''' don’t",
}

_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    "     \t\n\r",
    ".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`",
    "éèüößñçøåłžščğı",
    "абвгдежзАБВГ",
    "日本語中文测试漢字かなカナ한국어",
    "नमस्तेक्षकृ",
    "مرحباشعال",
    "😀🎉👍🏽\u200d♀️🇩🇪",
    "\x00\x01\x7f\u00a0\u2003\u3000\ufeff\u200b▁",
)
_SNIPPETS = ("<bos>", "<|im_end|>", "<end_of_turn>", "\n\n", "   ", " the", "'s", "</s>", "<0x0A>", "http://")


def random_texts(count: int, seed: int) -> list[str]:
    """`count` strings of mixed scripts, the same for the same seed."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        parts: list[str] = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.15:
                parts.append(rng.choice(_SNIPPETS))
            else:
                alphabet = rng.choice(_ALPHABETS)
                parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 9))))
        texts.append("".join(parts))
    return texts
