"""Parameters whose local tensors are of a tensor subclass around several tensors, made by the class's own operations.

As in FSDP2, each rank's rows are a tensor of the class, so the class's own operations run in an optimizer's update. Its
all-gather extension decides what is gathered and what forwards see (``forms.extensions``). The gradient is always one
plain tensor:

    class around a, b      a | rows 0, 1 | rows 2, 3 | row 4, zeros |      the local tensor of rank 0 is the class
                           b | rows 0, 1 | rows 2, 3 | row 4, zeros |      around rows 0 and 1 of both
    gradient, .grad            rows 0, 1 | rows 2, 3 | row 4        |      plain

The extension's methods belong to the class, or were assigned to the local tensor after sharding.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from yafsdp_cc.engine.param import ShardedGrad, grad_dtype_of
from yafsdp_cc.forms.extensions import ExtensionFlatParam, ExtensionParam
from yafsdp_cc.forms.subclasses import PLAIN, nbytes_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class ClassParam(ExtensionParam):
    """A parameter whose local tensor is of the parameter's tensor subclass."""

    def local_range(self, chunk: Tensor) -> Tensor:
        if type(chunk) in PLAIN:
            return super().local_range(chunk)  # ``chunk`` is a plain buffer of gradients
        return chunk.narrow(0, 0, self.spec.local_shape[0])


class ClassFlatParam(ExtensionFlatParam):
    """One parameter whose shard is of the parameter's tensor subclass, [rows, ...], as many rows on each rank."""

    _versions = 0

    @property
    def sharded(self) -> Tensor:
        """The shard; its version rises with those of its inner tensors, which users may write to."""
        wrapped = (*tensors_of(self._sharded), *tensors_of(self.params[0].local))
        if (versions := sum(each._version for each in wrapped)) != self._versions:
            self._versions = versions
            torch._C._increment_version((self._sharded,))
        return self._sharded

    @sharded.setter
    def sharded(self, sharded: Tensor) -> None:
        self._sharded = sharded

    @property
    def device_bytes(self) -> int:
        return super().device_bytes - self.sharded.nbytes + nbytes_of(self.sharded)

    @property
    def rows(self) -> Tensor:
        return self.sharded

    def clear_padding(self) -> None:
        rows = self.params[0].spec.local_shape[0]
        for each in tensors_of(self.sharded):
            each.narrow(0, rows, each.size(0) - rows).zero_()

    def method(self, name: str) -> Callable[..., Any]:
        local = self.params[0].local
        given = vars(local).get(name)
        if given is None:
            found: Callable[..., Any] = getattr(self.sharded, name)
            return found
        # An extension on the local tensor would not see the rows that pad the shard, and ranks would gather different
        # shapes.
        is_method = inspect.ismethod(given) and given.__self__ is local
        bound: Callable[..., Any] = given.__func__.__get__(self.sharded) if is_method else given
        return bound

    def make_sharded_grad(self) -> ShardedGrad:
        if self.sharded_grad is None:
            buffer = torch.zeros(self.layout.chunks[self.rank], dtype=grad_dtype_of(self.params), device=self.device)
            self.sharded_grad = ShardedGrad(buffer, self.params)
        return self.sharded_grad
