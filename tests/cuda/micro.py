"""The smallest model with what decides a step's graph: a full layer, a sliding one, and biases.

A step of it takes the interpreter a third of a second; tests count their steps.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import transformers as tf

import larql_kv as lk
from larql_kv.model.model import Model
from tests import tiny_models

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@functools.cache
def directory() -> Path:
    """A Hugging Face directory of it."""
    name = "micro"
    tiny_models.FAMILIES[name] = lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZES))
    try:
        return tiny_models.model_dir(name)
    finally:
        del tiny_models.FAMILIES[name]


def load(stop: int | None = None) -> Model:
    """A model of its own, on the card or in the interpreter; `stop` is its only stop token."""
    model = lk.load_model(directory(), device="cuda")
    stops = frozenset() if stop is None else frozenset({stop})
    return dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, stop_ids=stops))


shared = functools.cache(load)
