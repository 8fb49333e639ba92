"""What goes into a unit and comes out of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import yafsdp_cc
from tests.models import WIDTH
from tests.ranks import ranks
from tests.twins import inputs, means, mine, numbers, same_gradients, seeded, square, trains_on, twins


class State(NamedTuple):
    hidden: Tensor
    masks: dict[str, Any]


class Stateful(nn.Module):
    """Takes tensors in containers, by keyword; returns the same."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.carry = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: State, more: list[Any], scale: float = 1.0) -> tuple[State, list[Any]]:
        hidden = torch.tanh(self.mix(state.hidden)) * scale + more[0]["x"]
        carry = self.carry(more[0]["x"]) * state.masks["keep"]
        return State(hidden, state.masks), [{"x": carry}, None]


class Machine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, *, state: State, more: list[Any]) -> dict[str, Any]:
        for block in self.blocks:
            state, more = block(state=state, more=more, scale=0.5)
        return {"out": [state.hidden], "more": more}


def machine(model: nn.Module, leaves: tuple[Tensor, Tensor]) -> Tensor:
    keep = torch.ones(WIDTH, dtype=torch.bool)
    out = model(state=State(leaves[0], {"keep": keep}), more=[{"x": leaves[1]}, None])
    return out["out"][0].square().mean() + out["more"][0]["x"].mean()


@ranks(2)
def test_containers_and_keywords_pass_gradients() -> None:
    model, plain = twins(Machine, units=[Stateful])
    for step in range(3):
        batches = [
            (
                numbers(3, WIDTH, seed=10 * step + rank, grad=True),
                numbers(3, WIDTH, seed=5 + 10 * step + rank, grad=True),
            )
            for rank in range(2)
        ]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in mine(batches)]
        machine(model, tuple(leaves)).backward()
        truth = means(plain, machine, batches)
        same_gradients(model, truth)
        for found, expected in zip(leaves, mine(batches), strict=True):
            assert torch.equal(found.grad, expected.grad)
        model.zero_grad()


class Convolving(nn.Module):
    """A layer of a graph network; its first layer makes the graph's edges, as a sparse matrix of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.edges, self.mix = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, graph: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if graph is None:
            to = torch.arange(len(x))
            places = torch.stack([to, to.flip(0)])
            graph = torch.sparse_coo_tensor(places, self.edges(x)[:, 0], (len(x), len(x)), check_invariants=False)
        return torch.tanh(self.mix(torch.sparse.mm(graph, x))), graph


class GraphNetwork(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolving() for _ in range(3)).requires_grad_(not frozen)
        self.layers[0].edges.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        graph = None
        for layer in self.layers:
            x, graph = layer(x, graph)
        return x


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_sparse_tensors_between_units_pass_gradients(frozen: bool) -> None:
    model, plain = twins(lambda: GraphNetwork(frozen), units=[Convolving])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Passing(nn.Module):
    """Hands on its input unchanged, None, and a view next to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        return x, None, (x.t(), self.inner(x))


class Passed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            same, _, (view, y) = block(x)
            x = same if index % 2 else view.t() + torch.sin(y.mul_(0.5))
        return x


@ranks(2)
def test_inputs_views_and_outputs_changed_in_place() -> None:
    model, plain = twins(Passed, units=[Passing])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Flattening(nn.Module):
    """Returns a view of what it computes, as patch embeddings do, and one of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        return y.unsqueeze(1).flatten(1), x.unsqueeze(1)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Flattening() for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = x
        for block in self.blocks:
            y, same = block(x)
            y[:, 0].mul_(2.0)
            y += same.squeeze(1)
            x = y
        return x.unsqueeze(0), start.unsqueeze(0)


@ranks(2)
def test_outputs_that_are_views_changed_in_place() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        y, same = model(2 * x)
        y += 1.0
        total: Tensor = (y * same).square().mean()
        return total

    model, plain = twins(Flattened, units=[Flattening])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)
    batches = inputs(step=3)
    for batch in batches:
        batch.requires_grad_()
    gradients = [torch.autograd.grad(loss(each, mine(batches)), mine(batches)) for each in (model, plain)]
    torch.testing.assert_close(*gradients)
    trains_on(model, plain, loss, [batches], within=1e-6)


class Wrapped:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Unwraps(nn.Module):
    """Takes its input in an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Wrapped) -> Tensor:
        return torch.tanh(self.inner(x.tensor))


class Unwrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unwraps() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(Wrapped(x))
        return x


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_inputs_in_an_unknown_object(frozen: bool) -> None:
    model, plain = twins(Unwrapping, units=[Unwraps])
    for each in (model, plain):
        each.blocks[1:].requires_grad_(not frozen)
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)


class Auxiliary(nn.Module):
    """Puts a loss aside, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = torch.sigmoid(self.gate(x)).square().mean()
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_losses_put_aside_in_units(frozen: bool) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        total: Tensor = model(x).square().mean() + sum(block.loss for block in model[1:])
        return total

    model, plain = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Auxiliary() for _ in range(4))))
    for each in (model, plain):
        each[1:].requires_grad_(not frozen)
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


class Predicting(nn.Module):
    """Block that puts aside a prediction made of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.inner(x))
        self.prediction = torch.tanh(self.head(y))
        return y


@ranks(2)
def test_a_loss_put_aside_behind_the_output_reads_the_weights_of_its_unit() -> None:
    """Another unit's weights are in the buffer when the backward comes to the unit."""

    def loss(model: Any, x: Tensor) -> Tensor:
        total: Tensor = model(x).square().mean() + sum(block.prediction.square().mean() for block in model)
        return total

    model, plain = twins(lambda: nn.Sequential(*(Predicting() for _ in range(5))), units=[Predicting])
    for block in model:
        block.set_modules_to_backward_prefetch([model[4]])
    trains_on(model, plain, loss, [inputs(step=step) for step in range(2)], within=1e-6)


@ranks(2)
def test_a_leaf_among_the_outputs_keeps_no_hooks() -> None:
    """A hook of an earlier forward would take the next backward for one of that forward."""
    prompt = numbers(WIDTH, seed=1, grad=True)

    class Prompted(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + prompt), prompt

    model, _ = twins(lambda: Prompted(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        y, same = model(mine(inputs(step=step)))
        assert same is prompt
        (y.square().mean() + same.square().mean()).backward()
        optimizer.step()
    assert not prompt._backward_hooks


@dataclass
class Shared:
    """Activations that blocks hand on to each other; ``late`` has no value at first."""

    x: Tensor
    seen: list[Tensor]
    sums: dict[str, Tensor]
    late: Tensor = field(init=False)
    count: int = 0


class Filling(nn.Module):
    """Block that returns nothing, and changes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, shared: Shared, losses: list[Tensor], *, skips: deque[Tensor]) -> None:
        x = shared.x + skips.popleft() + torch.tanh(self.inner(shared.x))
        skips.append(x)
        shared.x, shared.late, shared.count = x, x.detach(), shared.count + 1
        shared.seen.insert(0, x)
        shared.sums["last"] = x.sum()
        setattr(shared, "energy", x.square().mean())  # noqa: B010  (no field of the class)
        losses.append(torch.sigmoid(self.gate(x)).square().mean())


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Filling() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        shared, losses, skips = Shared(2 * x, [x], {"first": x.sum()}), [], deque([x, 0.5 * x])
        for index, block in enumerate(self.blocks):
            assert block(shared, losses, skips=skips) is None
            assert len(losses) == shared.count == index + 1
            assert len(skips) == 2
            assert shared.seen[-1] is x
            assert torch.equal(shared.late, shared.x)
        total: Tensor = torch.stack(shared.seen).square().mean() + sum(losses) + 0.01 * shared.sums["last"]
        return total + skips.popleft().mean() + vars(shared)["energy"]


@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_containers_among_the_arguments_keep_what_a_unit_puts_into_them(reshard: bool) -> None:
    model, plain = twins(Filled, units=[Filling], reshard_after_forward=reshard)
    trains_on(model, plain, lambda m, x: m(x), [inputs(step=step) for step in range(2)], within=1e-6)
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    yafsdp_cc.shard(seeded(Filled), units=[Filling], mp_policy=policy)(mine(inputs())).backward()


@dataclass
class Node:
    value: Tensor
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None

    def __copy__(self) -> Node:
        return Node(self.value, self.children, self.parent)


class Climbing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, node: Node) -> Tensor:
        return torch.tanh(self.inner(node.value + sum(child.value for child in node.children)))


class Climbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Climbing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        root = Node(2 * x)
        vars(root)["cache"] = {}  # a copy has no such attribute
        root.children += [Node(x, parent=root), Node(x * x, parent=root)]
        for block in self.blocks:
            root.value = root.children[0].value = block(root)
        return root.value


@ranks(2)
def test_nodes_of_a_tree_refer_to_their_parents() -> None:
    model, plain = twins(Climbed, units=[Climbing])
    trains_on(model, plain, square, [inputs(step=step) for step in range(2)], within=1e-6)
