"""Norms and clipping of sharded parameters, held against one process with whole tensors."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.flats import EMPTY_GRADIENT, mesh_of_all, part_of, specs_of, twins, uneven_specs_of
from tests.ranks import on_ranks
from yafsdp_cc.tensor.reductions import LazyReduction


class Counter:
    """Counts collectives by name while patched over ``torch.distributed``'s."""

    def __enter__(self):
        self.all_reduces, self.original = 0, dist.all_reduce

        def counting(*args, **kwargs):
            self.all_reduces += 1
            return self.original(*args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_):
        dist.all_reduce = self.original


def clipping():
    mesh = mesh_of_all()
    for specs, order, foreach in itertools.product(
        (specs_of, uneven_specs_of), (1, 2, 3, 0.5, math.inf), (None, False, True)
    ):
        ours, theirs = twins(mesh, specs)
        if order == math.inf:  # torch knows no maximum of a tensor without elements.
            del theirs[EMPTY_GRADIENT]
        with Counter() as counter:
            norm = nn.utils.clip_grad_norm_(ours, 1.0, order, error_if_nonfinite=True, foreach=foreach)
        expected = nn.utils.clip_grad_norm_(theirs, 1.0, order, foreach=foreach)
        assert counter.all_reduces == 1
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(norm.full_tensor(), expected)
        assert norm.item() == norm.full_tensor().item()
        assert f"{norm:.2f}" == f"{norm.item():.2f}"
        with Counter() as counter:
            assert "LazyReduction" in repr(nn.utils.get_total_norm([p.grad for p in ours], order, foreach=foreach))
        assert counter.all_reduces == 0
        nn.utils.clip_grads_with_norm_(ours, 0.5, norm, foreach=foreach)
        nn.utils.clip_grads_with_norm_(theirs, 0.5, expected, foreach=foreach)
        nn.utils.clip_grad_value_(ours, 0.01, foreach=foreach)
        nn.utils.clip_grad_value_(theirs, 0.01, foreach=foreach)
        for our, their in zip([p for p in ours if p.numel()], [p for p in theirs if p.numel()], strict=True):
            torch.testing.assert_close(our.grad.full_tensor(), their.grad)
    return norm.item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clipping_equals_a_single_process_with_one_all_reduce(world):
    assert len(set(on_ranks(world, clipping))) == 1


def mixed_clipping():
    mesh = mesh_of_all()
    ours, theirs = twins(mesh)
    halves, whole_halves = twins(mesh, uneven_specs_of, dtype=torch.bfloat16)
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.full((3,), 2.0)
    alone = copy.deepcopy(plain)
    alone.grad = plain.grad.clone()
    with Counter() as counter:
        norm = nn.utils.clip_grad_norm_([plain, *ours, *halves], 1.0)
    assert counter.all_reduces == 1
    expected = nn.utils.clip_grad_norm_([alone, *theirs, *whole_halves], 1.0)
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-3, atol=0)  # Their bf16 norms are rounded.
    torch.testing.assert_close(plain.grad, alone.grad, rtol=1e-3, atol=0)


def test_clipping_mixes_dtypes_and_plain_tensors():
    on_ranks(2, mixed_clipping)


def norms_by_hand():
    mesh = mesh_of_all()
    ours, theirs = twins(mesh, uneven_specs_of)
    with torch.no_grad(), Counter() as counter:
        total = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2) for p in ours]), 2)
        assert type(total) is LazyReduction
        assert counter.all_reduces == 0
        detached = total.detach()
        expected = torch.norm(torch.stack([torch.norm(p.grad) for p in theirs]))
        assert bool(total > 0)
        torch.testing.assert_close(detached.full_tensor(), expected)
        assert counter.all_reduces == 1
    with torch.no_grad():
        for our, their in zip(ours, theirs, strict=True):
            if their.numel():
                assert our.max().item() == their.max().item()
                assert our.min().item() == their.min().item()
                assert [our.amax().item(), our.amin().item()] == [their.amax().item(), their.amin().item()]
                with pytest.raises(NotImplementedError, match="amax over some of its dimensions"):
                    our.view(1, -1).amax(0)
                assert our.norm(-math.inf).item() == their.norm(-math.inf).item()
                torch.testing.assert_close(our.norm(-1).full_tensor(), their.norm(-1))
                assert [x.item() for x in torch._foreach_max([our])] == [their.max().item()]
            assert our.norm(0).item() == their.norm(0).item()
            for cast in (torch.int64, torch.int32, torch.bool, torch.float64):
                for found, expected in ((our.sum() * 10, their.sum() * 10), (our.norm(), their.norm())):
                    assert found.to(cast).float().item() == pytest.approx(expected.to(cast).float().item())
            assert our.double().norm(2, dtype=torch.float32).full_tensor().dtype == torch.float32
            assert our.isnan().any().item() is False
            assert our.equal(our.clone())
            assert our.allclose(our + 1e-9)
        same = torch.equal(
            ours[0], ours[0] + (torch.rand_like(ours[0]) if dist.get_rank() == 0 else torch.zeros_like(ours[0]))
        )
    assert not same or ours[0].to_local().numel() == 0


def test_norms_by_hand():
    on_ranks(2, norms_by_hand)


def complex_numbers_and_integers():
    """Sums of complex numbers are refused, on ranks without elements, too: ranks add in float64."""
    spec = uneven_specs_of(mesh_of_all())[0]
    real = torch.arange(108.0).view(12, 9)
    frozen, longs, small = (
        part_of(x, spec) for x in (torch.complex(real, -real), real.long() + 2**60, real.to(torch.int8))
    )
    for order in (2, 1, math.inf):
        found, expected = frozen.norm(order), torch.complex(real, -real).norm(order)
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found.full_tensor(), expected)
    for refused in (frozen.sum, frozen.mean):
        with pytest.raises(NotImplementedError, match=r"on 'ragged\.0'.* in float64, .*: call \.full_tensor\(\)"):
            refused()
    with pytest.raises(NotImplementedError, match=r"mean of torch.int8 on 'ragged\.0'.*: pass dtype=torch.float32"):
        small.mean()
    assert (part_of(real, spec) > 5).long().sum().item() == 102
    whole = real.to(torch.int8)
    for name in ("sum", "max", "min", "any"):
        found, expected = getattr(small, name)(), getattr(whole, name)()
        assert (found.item(), found.dtype) == (expected.item(), expected.dtype)
    assert longs.mean(dtype=torch.float64).item() == (real.long() + 2**60).mean(dtype=torch.float64).item()
    assert [longs.all().item(), frozen.any().item()] == [True, True]


def test_complex_numbers_and_integers():
    on_ranks(2, complex_numbers_and_integers)


def norms_as_loggers_read_them():
    ours, theirs = twins(mesh_of_all(), uneven_specs_of)
    expected = theirs[0].grad.norm().item()
    known = nn.utils.get_total_norm([ours[0].grad])
    known.item()
    for norm in (known, ours[0].grad.norm()):
        with torch.inference_mode():
            detached = norm.detach()
        for value in (detached, norm):
            assert value.detach().cpu().numpy().item() == pytest.approx(expected)
            assert value.tolist() == pytest.approx(expected)


def test_norms_as_loggers_read_them():
    on_ranks(2, norms_as_loggers_read_them)


def stacked_with_other_numbers():
    """A log stacks norms with losses, which may be negative."""
    ours, theirs = ([p.grad for p in ps] for ps in twins(mesh_of_all(), uneven_specs_of))
    loss = torch.tensor(-2.0)

    def stacks(grads):
        for order in (2, 3, 1, 0, math.inf):
            norms = grads[0].norm(order), grads[1].norm(order)
            yield torch.stack([*norms, loss])
            yield torch.stack([norms[0], -grads[1].norm(order)])
            yield torch.linalg.vector_norm(torch.stack([*norms, loss]), order)
        yield torch.stack([grads[0].sum(), grads[0].max(), grads[0].min(), loss])
        yield torch.stack([grads[0].max(), loss * 100])
        yield torch.stack([grads[0].min(), loss * 100])
        yield torch.stack([(grads[0] > 100).any(), (grads[0] == grads[0]).all(), loss > 0])
        yield torch.stack([grads[0].any(), loss > 0])

    for found, expected in zip(stacks(ours), stacks(theirs), strict=True):
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, expected)


def test_norms_stacked_with_other_numbers():
    on_ranks(2, stacked_with_other_numbers)


def nonfinite(value, order):
    mesh = mesh_of_all()
    ours, _ = twins(mesh)
    if dist.get_rank() == mesh.size() - 1:
        ours[6].grad.to_local()[0] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours, 1.0, order, error_if_nonfinite=True)
    norm = nn.utils.get_total_norm([p.grad for p in ours], order)
    return str(norm.item())


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_rank_s_nonfinite_gradient_is_seen_by_all(value, order):
    assert on_ranks(4, nonfinite, value, order) == [str(value)] * 4
