"""A random model of a shape as a GGUF file: the same weights, for llama.cpp or for `load_model`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from larql_kv.model.gguf_header import GgufArray
from larql_kv.model.shape_models import RandomSource
from larql_kv.model.shape_recipes import Shape, parse_shape

if TYPE_CHECKING:
    from pathlib import Path

    import gguf


def write_random_gguf(path: str | os.PathLike[str], shape: str | Shape, seed: int = 0) -> Path:
    """Write the model that `random_model(shape, seed=seed)` runs, one tensor in memory at a time.

    Raises ModelError for an unknown shape. The file is as large as the shape says (gemma3-4b: 2.5 GB).
    """
    from pathlib import Path

    import gguf

    shape = parse_shape(shape) if isinstance(shape, str) else shape
    source = RandomSource(shape, seed)
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in source.file.metadata.items():
        if key != "general.architecture":  # the writer has put it there
            _add(writer, key, value)
    for tensor in source.file.tensors.values():
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in source.file.tensors:
        writer.write_tensor_data(source.stored(name))
    writer.close()
    return Path(path)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, GgufArray):
        writer.add_array(key, value.bytes_list() if value.is_text else value.tolist())
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
