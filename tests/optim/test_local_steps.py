"""Local steps of ZeroOneAdam: what replicas do by themselves, what they say when they meet, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import tests.optim.lossless  # noqa: F401 - registers its codec
import yafsdp_cc
from tests.optim.slopes import BLOCK, SHAPES, Slope, Slopes, drawn, sharded, weights
from tests.ranks import on_ranks
from yafsdp_cc.engine.module import root_of
from yafsdp_cc.engine.residuals import mean_residuals
from yafsdp_cc.optim import ZeroOneAdam

KAPPA, MOST = 3, 3
EXACT = {1, 2, 3, 5, 7, 9, 13, 17, 21, 29}
MEETINGS = {4, 6, 8, 12, 16, 20, 24, 27, 28}
"""By hand: between exact sums that are 2, 4 and 8 steps apart, at most 3 steps without a word."""
BETAS, EPS, DECAY = (0.8, 0.95), 1e-8, 0.1
MESHES = pytest.mark.parametrize(("world", "replicas"), [(2, 2), (4, 2), (4, 4)])


def mesh_of(replicas: int) -> Any:
    shape = replicas, dist.get_world_size() // replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def made(replicas: int, codec: str = "onebit", **more: Any) -> tuple[Any, ZeroOneAdam]:
    settings = {"local_steps": MOST, **more.pop("settings", {})}
    model = sharded(codec, mesh=mesh_of(replicas), **more)
    return model, made_by(model, **settings)


def made_by(model: Any, **settings: Any) -> ZeroOneAdam:
    names = dict(model.named_parameters())
    groups = [
        {"params": [each for name, each in names.items() if kind in name], "weight_decay": decay}
        for kind, decay in (("weight", DECAY), ("bias", 0.0))
    ]
    return ZeroOneAdam(groups, 1e-2, BETAS, EPS, **({"refreshes": KAPPA} | settings))


def rate(step: int, kind: str) -> float:
    """It changes between two meetings, and is 0 from one to the next."""
    return 0.0 if 10 <= step <= 12 else (0.01 if kind == "weight" else 0.02) * (1 + step % 3)


def trained(model: Any, optimizer: Any, steps: range, clip: float | None = None) -> None:
    """Steps that are counted from 1 on."""
    for step in steps:
        for group, kind in zip(optimizer.param_groups, ("weight", "bias"), strict=False):
            group["lr"] = rate(step, kind)
        model(drawn(step, dist.get_rank())).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def are_alike(model: Any, mesh: Any, tensors: list[Any] | None = None) -> bool:
    """Whether replicas have the same bits, on all ranks."""
    parts = [each.to_local() for each in tensors or list(model.parameters())]
    local = torch.cat([each.detach().flatten() for each in parts])
    others = [torch.empty_like(local) for _ in range(mesh.size(0))]
    dist.all_gather(others, local, group=mesh.get_group("replicate"))
    differs = torch.tensor([float(any(not local.equal(other) for other in others))])
    dist.all_reduce(differs)
    assert differs in (0, dist.get_world_size())
    return not differs


class Reference:
    """All of ``Slopes`` in float64, as every replica has it; ``shards`` ranks in each."""

    def __init__(self, model: Any, replicas: int, codec: str) -> None:
        self.replicas, self.shards, self.codec = replicas, dist.get_world_size() // replicas, codec
        self.chunks = [unit.flats[0].layout.chunk for unit in root_of(model).units]
        start = [each.detach().double() for each in Slopes().parameters()]
        self.x = [list(start) for _ in range(replicas)]
        self.m = [[torch.zeros_like(each) for each in start] for _ in range(replicas)]
        self.v = [torch.zeros_like(each) for each in start]
        self.unsaid = [[torch.zeros_like(each) for each in start] for _ in range(replicas)]
        self.seen = 0
        self._begin()

    def _begin(self) -> None:
        self.anchor = list(self.x[0])
        self.u = [[torch.zeros_like(each) for each in self.v] for _ in range(self.replicas)]
        self.sum, self.reach, self.kept = ([start] * len(self.v) for start in (0.0, 0.0, 1.0))
        self.steps = 0

    def gradients(self, step: int, replica: int, clip: float | None) -> list[Tensor]:
        """The mean over the ranks of a replica, or of all for −1."""
        ranks = range(self.shards * self.replicas) if replica < 0 else range(self.shards)
        slopes = [drawn(step, rank + self.shards * max(replica, 0)) for rank in ranks]
        means = [torch.stack([slope[index].double() for slope in slopes]).mean(0) for index in range(len(SHAPES))]
        found = [each for mean in means for each in (mean, mean.sum(1))]
        if clip is None:
            return found
        norm = torch.cat([each.flatten() for each in found]).norm()
        return [each * min(1.0, clip / (float(norm) + 1e-6)) for each in found]

    def step(self, step: int, clip: float | None = None) -> None:
        if step in EXACT:
            gradients = [self.gradients(step, -1, clip)] * self.replicas
            self.seen += 1
            self.v = [BETAS[1] * v + (1 - BETAS[1]) * g**2 for v, g in zip(self.v, gradients[0], strict=True)]
        else:
            gradients = [self.gradients(step, replica, clip) for replica in range(self.replicas)]
            self.steps += 1
        furthest = 1.0 if step > KAPPA else torch.inf
        for index, v in enumerate(self.v):
            kind, decay = ("bias", 0.0) if index % 2 else ("weight", DECAY)
            lr, root = rate(step, kind), (v / (1 - BETAS[1] ** self.seen)).sqrt() + EPS
            rest, eta = 1 - lr * decay, lr / (1 - BETAS[0] ** step)
            if step not in EXACT:
                self.sum[index] = rest * self.sum[index] + eta
                self.reach[index] = rest * self.reach[index] + lr
                self.kept[index] *= rest
            for replica in range(self.replicas):
                m = BETAS[0] * self.m[replica][index] + (1 - BETAS[0]) * gradients[replica][index]
                self.m[replica][index] = m
                if step in EXACT:
                    moved = lr * (m / root / (1 - BETAS[0] ** step)).clamp(-furthest, furthest)
                    self.x[replica][index] = self.x[replica][index] * rest - moved
                else:
                    self.u[replica][index] = rest * self.u[replica][index] + eta * m
                    self._place(replica, index, root)
            if step in MEETINGS:
                self._meet(index, root)
        if step in EXACT or step in MEETINGS:
            self._begin()

    def _place(self, replica: int, index: int, root: Tensor) -> None:
        moved = (self.u[replica][index] / root).clamp(-self.reach[index], self.reach[index])
        self.x[replica][index] = self.anchor[index] * self.kept[index] - moved

    def _meet(self, index: int, root: Tensor) -> None:
        said = []
        for replica in range(self.replicas):
            total = self.sum[index]
            due = self.u[replica][index] / total if total else self.m[replica][index]
            due = due * self.steps * self.shards + self.unsaid[replica][index]
            if index % 2 or self.codec == "lossless":
                said.append(due)
                continue
            said.append(self._said(due, self.chunks[index // 2]))
            self.unsaid[replica][index] = due - said[-1]
        mean = torch.stack(said).mean(0) / self.shards / self.steps
        for replica in range(self.replicas):
            self.m[replica][index] = mean
            self.u[replica][index] = mean * self.sum[index]
            self._place(replica, index, root)

    def _said(self, due: Tensor, chunk: int) -> Tensor:
        """What one bit says: signs, times the mean magnitude of each block of each chunk."""
        whole = torch.zeros(chunk * self.shards, dtype=torch.float64)
        filled = torch.zeros_like(whole)
        whole[: due.numel()], filled[: due.numel()] = due.flatten(), 1
        blocks, inside = whole.view(-1, BLOCK), filled.view(-1, BLOCK)
        scales = (blocks.abs() * inside).sum(1) / inside.sum(1).clamp(min=1)
        signs = torch.where(blocks.signbit(), -1.0, 1.0) * scales.unsqueeze(1)
        return signs.flatten()[: due.numel()].view(due.shape)


def as_written_out(replicas: int, codec: str, clip: float | None) -> None:
    model, optimizer = made(replicas, codec)
    mesh, reference = mesh_of(replicas), Reference(model, replicas, codec)
    own = dist.get_rank() // reference.shards
    for step in range(1, 31):
        trained(model, optimizer, range(step, step + 1), clip)
        reference.step(step, clip)
        is_together = step in EXACT or step in MEETINGS
        assert are_alike(model, mesh) is (is_together or 10 <= step <= 12), step  # at a rate of 0 nothing moves
        if is_together:
            moments = [optimizer.state[each][name] for each in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
            assert are_alike(model, mesh, moments), step
        for index, (found, wanted) in enumerate(zip(weights(model), reference.x[own], strict=True)):
            off = (found.double() - wanted).abs() > 5e-6
            # A sum of almost nothing may round to the other sign, and the block's next scale is another one then.
            assert off.float().mean() <= (0.03 if codec == "onebit" and index % 2 == 0 else 0), (step, index)


@MESHES
@pytest.mark.parametrize("codec", ["lossless", "onebit"])
def test_steps_are_those_of_the_algorithm_in_float64(world, replicas, codec):
    on_ranks(world, as_written_out, replicas, codec, None)


def test_each_replica_clips_by_the_norm_of_its_own_gradients():
    on_ranks(4, as_written_out, 2, "lossless", 30.0)


# Bytes ----------------------------------------------------------------------------------------------------------------


def bytes_sent(replicas: int) -> tuple[list[int], int, int]:
    model, optimizer = made(replicas)
    counters, sent = yafsdp_cc.counters_of(model), []
    for step in range(1, 22):
        before = counters.reduced_bytes
        trained(model, optimizer, range(step, step + 1))
        sent.append(counters.reduced_bytes - before)
    flats = [flat for unit in root_of(model).units for flat in unit.flats]
    across = root_of(model).reductions.replicas
    assert across is not None
    messages = [across.encoded_of(flat) for flat in flats]
    encoded = sum(each.sent_bytes() for each in messages if each is not None)
    return sent, encoded, 4 * sum(flat.layout.chunk for flat in flats)


def test_nothing_crosses_replicas_until_they_meet():
    for sent, encoded, chunks in on_ranks(2, bytes_sent, 2):  # replicas of one rank: all that is sent crosses them
        small = sent[0] - chunks
        for step, size in enumerate(sent, 1):
            assert size == (small + chunks if step in EXACT else small + encoded if step in MEETINGS else 0), step
        assert 0 < 20 * encoded < chunks
    for sent, encoded, chunks in on_ranks(4, bytes_sent, 2):
        exact, alone, met = sent[12], sent[13], sent[15]
        small = exact - 2 * chunks  # sums over a shard, and over replicas
        assert chunks < alone < exact - chunks
        assert met == alone + small + encoded


# Checkpoints ----------------------------------------------------------------------------------------------------------


def saved(folder: Any) -> None:
    model, optimizer = made(2, compression={"residual": "int8"})
    trained(model, optimizer, range(1, 17))
    yafsdp_cc.save(folder / "step", model, optimizer)
    found, unsaid, second = weights(model), whole_residuals(model), second_moments(model, optimizer, 6 * [7])
    trained(model, optimizer, range(17, 27))
    truth = found, unsaid, second, weights(model)  # replicas are apart by now
    torch.save(truth, folder / f"truth{dist.get_rank()}.pt")


def second_moments(model: Any, optimizer: Any, seen: list[int]) -> list[Tensor]:
    """Corrected for their start at zero, where they have seen so many gradients."""
    pairs = zip(model.parameters(), seen, strict=True)
    return [optimizer.state[each]["exp_avg_sq"].full_tensor() / (1 - BETAS[1] ** count) for each, count in pairs]


def whole_residuals(model: Any) -> dict[str, Tensor]:
    return {name: each.full_tensor() for name, each in mean_residuals(root_of(model)).items()}


def resumed(folder: Any, replicas: int) -> None:
    found, unsaid, second, truth = torch.load(folder / f"truth{dist.get_rank()}.pt")
    if replicas:
        model, optimizer = made(replicas, compression={"residual": "int8"})
        trained(model, optimizer, range(1, 9))  # states of its own, that are forgotten
    else:
        model = sharded(compression={"residual": "int8"})
        optimizer = made_by(model)
    yafsdp_cc.load(folder / "step", model, optimizer)
    assert optimizer.steps == 16
    assert all(one.equal(other) for one, other in zip(weights(model), found, strict=True))
    now = second_moments(model, optimizer, 6 * [7] if replicas else 3 * [7, 16])  # biases have their own without them
    assert all(torch.allclose(one, other, rtol=1e-5) for one, other in zip(now, second, strict=True))
    left = whole_residuals(model)
    assert left.keys() == unsaid.keys()
    assert all(unsaid[name].any() and torch.allclose(left[name], unsaid[name], atol=1e-6) for name in left)
    trained(model, optimizer, range(17, 27))
    far = [
        (one - other).norm() / (one - old).norm() for one, other, old in zip(truth, weights(model), found, strict=True)
    ]
    if dist.get_world_size() == 4:
        assert max(far) == 0
    else:
        assert 0 < max(far) < 3, far  # of other batches
    if replicas:
        optimizer.meet()
        assert are_alike(model, mesh_of(replicas))


def test_a_run_goes_on_from_a_meeting_bit_for_bit_and_with_other_ranks(tmp_path):
    on_ranks(4, saved, tmp_path)
    on_ranks(4, resumed, tmp_path, 2)
    on_ranks(2, resumed, tmp_path, 2)
    on_ranks(2, resumed, tmp_path, 0)


def refused_apart(folder: Any) -> None:
    model, optimizer = made(2)
    mesh = mesh_of(2)
    trained(model, optimizer, range(1, 9))
    yafsdp_cc.save(folder / "before", model, optimizer)
    trained(model, optimizer, range(9, 15))
    assert not are_alike(model, mesh)
    for mistake in (
        lambda: yafsdp_cc.save(folder / "step", model, optimizer),
        lambda: yafsdp_cc.save(folder / "step", model),
        lambda: yafsdp_cc.load(folder / "before", model, optimizer),
        lambda: get_model_state_dict(model),
        lambda: model.load_state_dict({}),
        lambda: yafsdp_cc.full_state_dict(model),
        lambda: yafsdp_cc.whole_parameters(model).__enter__(),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: ZeroOneAdam(model.parameters()),
    ):
        with pytest.raises(RuntimeError, match=r"while replicas make steps by themselves.* call .*meet\(\)"):
            mistake()
    assert not (folder / "step").exists()
    before = weights(model)
    optimizer.meet()
    met = weights(model)
    assert are_alike(model, mesh)
    assert not any(one.equal(other) for one, other in zip(before, met, strict=True))
    yafsdp_cc.save(folder / "step", model, optimizer)
    optimizer.meet()  # they are together
    assert all(one.equal(other) for one, other in zip(weights(model), met, strict=True))
    trained(model, optimizer, range(15, 17))
    assert are_alike(model, mesh)


def test_what_is_of_all_replicas_is_refused_until_they_meet(tmp_path):
    on_ranks(4, refused_apart, tmp_path)


def refused() -> None:
    def said(match: str, model: Any, **settings: Any) -> None:
        with pytest.raises(ValueError, match=match):
            ZeroOneAdam(model.parameters(), **settings)

    said("local_steps=4|and there are no replicas: shard over a mesh", sharded(), local_steps=4)
    said("there are no replicas", sharded(mesh=mesh_of(1)), local_steps=2)
    model = sharded(mesh=mesh_of(2), compression={"scope": "shard"})
    said("with scope='shard' nothing between replicas is encoded", model, local_steps=2)
    said("local_steps=0: a number of steps", model, local_steps=0)
    trained(model, ZeroOneAdam(model.parameters()), range(1, 3))  # the model is as it was


def test_local_steps_want_replicas_and_a_wire_between_them():
    on_ranks(4, refused)


# Beside other things --------------------------------------------------------------------------------------------------


def beside_a_scaler() -> None:
    (plain, ours), (scaled, theirs) = made(2), made(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    yafsdp_cc.follow_scaler(scaled, scaler)

    def step(number: int, slopes: list[Tensor]) -> None:
        scaler.scale(scaled(slopes)).backward()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()

    for number in range(1, 15):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.01 * number
        plain(drawn(number, dist.get_rank())).backward()
        ours.step()
        ours.zero_grad()
        step(number, drawn(number, dist.get_rank()))
    assert scaler.get_scale() > 1024
    assert all(one.equal(other) for one, other in zip(weights(plain), weights(scaled), strict=True))
    before, scale = weights(scaled), scaler.get_scale()
    first, *others = drawn(15, dist.get_rank())
    if dist.get_rank() == 3:  # in one replica, which makes steps by itself
        first[0, 0] = torch.inf
    step(15, [first, *others])
    assert scaler.get_scale() == scale / 2
    assert theirs.steps == 14
    assert all(one.equal(other) for one, other in zip(weights(scaled), before, strict=True))
    for number in range(15, 17):
        step(number, drawn(number, dist.get_rank()))
    assert are_alike(scaled, mesh_of(2))
    assert all(each.isfinite().all() for each in weights(scaled))


def test_a_scaler_changes_nothing_and_skips_a_step_in_all_replicas():
    on_ranks(4, beside_a_scaler)


def in_micro_batches() -> None:
    (once, ours), (twice, theirs) = made(2, "lossless"), made(2, "lossless")
    for step in range(1, 17):
        batches = [drawn(2 * step + half, dist.get_rank()) for half in range(2)]
        once([sum(parts) for parts in zip(*batches, strict=True)]).backward()
        for half, batch in enumerate(batches):
            twice.set_requires_all_reduce(half == 1)
            twice(batch).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(weights(once), weights(twice), strict=True))
    trained(twice, theirs, range(17, 20))
    twice.set_requires_all_reduce(False)
    twice(drawn(40, dist.get_rank())).backward()
    with pytest.raises(RuntimeError, match="replicas cannot meet while gradients of micro-batches"):
        theirs.meet()
    twice.set_requires_all_reduce(True)
    twice(drawn(41, dist.get_rank())).backward()
    theirs.step()
    assert are_alike(twice, mesh_of(2))


def test_micro_batches_are_one_step():
    on_ranks(4, in_micro_batches)


class Choosy(Slope):
    """Uses its weight only where a batch says so."""

    def forward(self, slope: Any) -> Tensor:
        found: Tensor = self.bias.sum() if slope is None else super().forward(slope)
        return found


def used_by_one() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()
    compression = yafsdp_cc.Compression("onebit", residual="fp32", block=BLOCK)
    plain = Slopes()
    plain.parts = torch.nn.ModuleList(Choosy(shape) for shape in SHAPES)
    model: Any = yafsdp_cc.shard(plain, units=[Choosy], compression=compression, mesh=mesh)
    optimizer = ZeroOneAdam(model.parameters(), 1e-2, BETAS, refreshes=1, local_steps=4)
    start = weights(model)
    phases = []
    for step in range(1, 16):
        late, middle, last = drawn(step, rank)
        slopes = [late if step >= 10 and rank == 3 else None, middle if rank < 2 or step == 1 else None, last]
        phases.append(optimizer.phase.value)
        model(slopes).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = weights(model)
        assert now[0].equal(start[0]) is (step < 12), step
    # 1, 3, 7 and 15 by the rule with κ = 1; and after the meeting that follows the first use, by one rank in step 10.
    assert [step for step, phase in enumerate(phases, 1) if phase == "exact"] == [1, 3, 7, 12, 15]
    assert are_alike(model, mesh)
    counts = torch.stack([optimizer.state[each]["step"] for each in model.parameters()])
    most = counts.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert counts.equal(most)


def test_what_one_replica_uses_is_known_to_all_when_they_have_met():
    on_ranks(4, used_by_one)


def kept_whole() -> None:
    model, optimizer = made(2, zero_stage=2, compression={"weights": "int4"}, settings={"local_steps": 2})
    units = root_of(model).units

    def differ(step: int) -> list[bool]:
        """Whether whole weights that ranks keep are others than those of the shards."""
        trained(model, optimizer, range(step, step + 1))
        with torch.no_grad():
            model(drawn(0, 0))
        parts = [each.weight.full_tensor().flatten() for each in model.parts]
        wholes = [unit.home.wholes[0][: part.numel()] for unit, part in zip(units, parts, strict=True)]
        return [not whole.equal(part) for whole, part in zip(wholes, parts, strict=True)]

    trained(model, optimizer, range(1, 14))
    assert all(differ(14))
    assert not any(differ(15))  # they have met, and go on by themselves


def test_whole_weights_that_are_kept_are_alike_too_when_replicas_have_met():
    on_ranks(4, kept_whole)


def watched() -> None:
    model, optimizer = made(2, "int8", settings={"refreshes": 4, "local_steps": 16})
    for step in range(1, 125):
        model(drawn(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 30:
            optimizer.meet()
    assert yafsdp_cc.counters_of(model).chosen == {}


def test_messages_of_many_steps_are_not_taken_for_gradients_that_grow():
    on_ranks(4, watched)


def further(codec: str, dtype: torch.dtype, compression: dict[str, Any]) -> None:
    """Many more steps, at first one and then up to 16 without a word."""
    mesh = mesh_of(2)

    def fresh(**more: Any) -> Any:
        return yafsdp_cc.shard(Slopes().to(dtype), units=[Slope], mesh=mesh, **more)

    exact, start = fresh(), [each.detach() for each in Slopes().parameters()]
    model = fresh(compression=yafsdp_cc.Compression(codec, block=BLOCK, **compression))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": BETAS, "weight_decay": DECAY}
    ours = ZeroOneAdam(model.parameters(), **settings, refreshes=4, local_steps=16)
    theirs = torch.optim.AdamW(exact.parameters(), **settings)
    steps = 0
    while steps < 120 or ours.lead.are_apart:
        slopes = [each.to(dtype) for each in drawn(steps, dist.get_rank())]
        for each, optimizer in ((model, ours), (exact, theirs)):
            each(slopes).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
    assert are_alike(model, mesh)
    trios = zip(weights(exact), weights(model), start, strict=True)
    far = [float((a - b).norm() / (a - c).norm()) for a, b, c in trios]
    assert 0 < max(far) < (0.7 if codec == "powersgd" else 0.35), far


@pytest.mark.parametrize(
    ("codec", "dtype", "compression"),
    [
        ("onebit", torch.float32, {"residual": "int8"}),
        ("int8", torch.bfloat16, {"feedback": False}),
        ("powersgd", torch.float32, {}),
    ],
)
def test_replicas_go_where_adamw_goes(codec, dtype, compression):
    on_ranks(4, further, codec, dtype, compression)
