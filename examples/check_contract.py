"""Every engine's promise, checked on this very model; and a false promise, which does not hold."""

from __future__ import annotations

from tiny_model import load_tiny_model

import larql_kv as lk
from larql_kv.policy import Verdict

model = load_tiny_model()
ids = model.tokenizer.encode(
    "A promise that nobody checks is a wish; a check that cannot fail is a decoration. " * 2
)

for spec in [entry.name for entry in lk.engines()] + ["standard:window=32"]:
    engine = lk.build_engine(spec, model)
    report = engine.policy.contract.check(engine, ids, prompt_tokens=100, free_tokens=16)
    print(f"{spec:<20} {report.contract:<28} {report.verdict}: {report.reason}")
    assert report.verdict != Verdict.BROKEN, report  # a short text leaves codes unexercised, and says so

# A promise that is not true does not hold: 32 rows are not the whole text.
windowed = lk.build_engine("standard:window=32", model)


class PretendsToBeWhole:
    """The windowed engine, judged against the full run."""

    fresh, is_reference, widest_window = windowed.fresh, False, windowed.widest_window

    @staticmethod
    def reference() -> lk.KvEngine:
        return lk.build_engine("standard", model)


report = lk.Exact().check(PretendsToBeWhole, ids, prompt_tokens=100, free_tokens=16)
print(f"{'standard:window=32':<20} {'Exact (a false promise)':<28} {report.verdict}: {report.reason}")
assert not report.ok
