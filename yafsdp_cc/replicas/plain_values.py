"""Tensors and plain values as one message, for untrusted peers: reading it runs no code.

    length of the next part, 8 bytes | ["dict", ["step", 7], ["exp", ["tensor", "float32", [2, 3]]]] | 24 bytes of "exp"

The second part is JSON: None, numbers and texts as they are, all others as a list of their kind and content. The bytes
of the tensors follow in the order of the JSON. Sizes are compared with the length of the message before anything is
allocated.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    )
}
_PREFIX = 8
_DEEPEST = 32
"""Largest depth of nested lists in a message."""


def encoded(value: Any) -> Tensor:
    """Return ``value`` as a message, [n] uint8 on the CPU.

    Raises:
        TypeError: ``value`` contains other things than tensors, plain values, lists, tuples and dicts.
    """
    tensors: list[Tensor] = []
    head = json.dumps(_described(value, tensors)).encode()
    text = len(head).to_bytes(_PREFIX, "little") + head
    flat = [each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in tensors]
    return torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), *flat])


def _described(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and (name := str(value.dtype).removeprefix("torch.")) in _DTYPES:
        tensors.append(value)
        return ["tensor", name, list(value.shape)]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_described(each, tensors) for each in value)]
    if isinstance(value, dict):
        return ["dict", *([_described(each, tensors) for each in item] for item in value.items())]
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} is neither a tensor nor a plain value")


def decoded(message: Tensor) -> Any:
    """Decode the result of ``encoded``.

    Raises:
        ValueError: the bytes of ``message`` are no result of ``encoded``.
    """
    try:
        end = _PREFIX + int.from_bytes(bytes(message[:_PREFIX].tolist()), "little")
        if end > len(message):
            raise ValueError(f"the message has {len(message)} of {end} bytes")
        head = json.loads(bytes(message[_PREFIX:end].tolist()))
        reader = _Reader(message[end:])
        value = reader.read(head, _DEEPEST)
    except (TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise ValueError(f"the message does not hold tensors and plain values: {error}") from None
    if len(reader.left):
        raise ValueError(f"{len(reader.left)} bytes follow the last tensor of the message")
    return value


class _Reader:
    def __init__(self, data: Tensor) -> None:
        self.left = data

    def read(self, item: Any, depth: int) -> Any:
        if type(item) in _PLAIN:
            return item
        if not depth or type(item) is not list or not item:
            raise ValueError(f"lists are nested more than {_DEEPEST} deep, or do not begin with their kind")
        kind, *content = item
        if kind == "tensor":
            return self._read_tensor(*content)
        if kind == "dict":
            return {self.read(key, depth - 1): self.read(value, depth - 1) for key, value in content}
        return {"list": list, "tuple": tuple}[kind](self.read(each, depth - 1) for each in content)

    def _read_tensor(self, name: str, shape: list[int]) -> Tensor:
        dtype = _DTYPES[name]
        if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
            raise ValueError(f"{shape} is no shape of a tensor")
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > len(self.left):
            raise ValueError(f"a tensor of {nbytes} bytes, and the message has {len(self.left)} bytes left")
        data, self.left = self.left[:nbytes], self.left[nbytes:]
        return data.clone().view(dtype).view(shape)
