"""Find every tensor storage an engine holds, without asking its ledger: walk the object graph."""

from __future__ import annotations

import gc
import types

import numpy as np
import torch

from larql_kv.engine.base import KvEngine

_ELSEWHERE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)


def held_storages(*engines: KvEngine) -> dict[int, int]:
    """Storage address -> bytes of what is reachable from the engines and not from their model or FFN."""
    outside = {id(item) for engine in engines for item in (engine.model, engine.model.decoder, engine.ffn)}
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[object] = [vars(engine) for engine in engines]
    while stack:
        item = stack.pop()
        if id(item) in seen or id(item) in outside or isinstance(item, _ELSEWHERE):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            base = item
            while isinstance(base.base, np.ndarray):
                base = base.base
            found[base.__array_interface__["data"][0]] = base.nbytes
        else:
            if isinstance(item, types.MethodType | types.CellType):
                stack.extend(gc.get_referents(item))
                continue
            stack.extend(gc.get_referents(item))
    return found
