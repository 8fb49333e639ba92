"""The results in words: a table per model and precision, and this engine beside its targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.contestants import OURS
from bench.training import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.models import Spec

MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """One figure of this engine, what it is held against, and what their ratio must not exceed."""

    what: str
    ours: float
    rival: str
    theirs: float
    limit: float
    """Of ours / theirs; 0 means that ours must be 0, 1 with an exact rival that both are equal."""
    met: bool

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None


def targets(spec: Spec, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Every target that the model can show, for each way in which this engine took part."""
    found: list[Target] = []
    for name in figures:
        if name.partition("/")[0] == OURS:
            found.extend(_targets(spec, figures, name))
    return [{**asdict(target), "ratio": target.ratio} for target in found]


def _targets(spec: Spec, figures: dict[str, Any], name: str) -> Iterator[Target]:
    ours = figures[name]
    names = {rival: name.replace(OURS, rival) for rival in ("fsdp2", "fsdp2-a2a")}
    rivals: dict[str, dict[str, Any]] = {rival: figures[other] for rival, other in names.items() if other in figures}
    fsdp2 = rivals.get("fsdp2")

    def within(what: str, mine: float, rival: str, theirs: float, limit: float) -> Target:
        return Target(f"{name}: {what}", mine, rival, theirs, limit, mine <= limit * theirs)

    if "cpu_ms" in ours:
        for rival, other in rivals.items():
            for kind in ("median", "min"):
                mine, theirs = ours["overhead_ms"][kind], other["overhead_ms"][kind]
                yield within(f"overhead, CPU ms ({kind})", mine, rival, theirs, 0.6)
        if fsdp2:
            if spec.name == "launch":
                for kind in ("median", "min"):
                    mine, theirs = (each["cpu_ms"]["forward_backward"][kind] for each in (ours, fsdp2))
                    yield within(f"forward + backward, CPU ms ({kind})", mine, "fsdp2", theirs, 0.6)
            mine, theirs = (sum(each["counts"]["copies"].values()) for each in (ours, fsdp2))
            yield within("copy-like ops per step", mine, "fsdp2", theirs, 0.5)
        allocated = ours["counts"]["owners"].get("engine", 0)
        yield Target(f"{name}: bytes the engine allocates per step", allocated, "none", 0, 0, allocated == 0)
    if "memory" in ours and fsdp2:
        for what, key in (("peak live, MiB", "peak_live"), ("peak resident, MiB", "peak_resident")):
            mine, theirs = (each["memory"][key] / MIB for each in (ours, fsdp2))
            yield within(what, mine, "fsdp2", theirs, 1.0)
    owned = ours.get("owned") or ours.get("memory")
    if owned:
        same = owned["owned_bytes"] == owned["planned_bytes"]
        yield Target(f"{name}: bytes owned", owned["owned_bytes"], "the plan", owned["planned_bytes"], 1.0, same)


def table(model: str, precision: str, result: dict[str, Any]) -> str:
    """Fixed-width, at most 110 columns."""
    spec = result["spec"]
    size = f"{spec['parameters']['elements'] / 1e6:.2f} M parameters in {spec['parameters']['tensors']} tensors"
    batch = f"{spec['sequences']} x {spec['length']} tokens per rank"
    lines = ["", f"{model}, {precision}: {spec['blocks']} blocks of width {spec['width']}, {size}, {batch}"]
    figures = result["contestants"]
    if spec["rounds"]:
        lines += _race_table(figures, spec["rounds"], spec["steps"])
    if spec["memory"]:
        lines += _memory_table(figures)
    if result["targets"]:
        lines += _target_table(result["targets"])
    return "\n".join(lines)


def _race_table(figures: dict[str, Any], rounds: int, steps: int) -> Iterator[str]:
    yield f"CPU ms per step and rank, {rounds} rounds of {steps} (median, min over rounds); counts of fwd + bwd"
    yield (
        f"{'':<15}{'fwd':>7}{'bwd':>7}{'clip':>5}{'step':>6} |{'f+b med':>8}{'min':>7} |{'overhead':>8}{'min':>7} |"
        f"{'tok/s':>7}{'ops':>6}{'copies':>7}{'MiB':>5}{'own KiB':>9}"
    )
    for name, one in figures.items():
        cpu, over, counts = one["cpu_ms"], one["overhead_ms"], one["counts"]
        ops, copies, size = (counts[key]["forward"] + counts[key]["backward"] for key in ("ops", "copies", "allocated"))
        yield (
            f"{name:<15}"
            + "".join(f"{cpu[phase]['median']:>{width}.1f}" for phase, width in zip(PHASES, (7, 7, 5, 6), strict=True))
            + f" |{cpu['forward_backward']['median']:>8.1f}{cpu['forward_backward']['min']:>7.1f}"
            + f" |{over['median']:>8.1f}{over['min']:>7.1f} |{one['tokens_per_s']['median']:>7.0f}"
            + f"{ops:>6}{copies:>7}{size / MIB:>5.0f}{counts['owners'].get('engine', 0) / 1024:>9.1f}"
        )
    for name, one in figures.items():
        for site, size in one["counts"]["sites"].items() if name.startswith(OURS) else ():
            yield f"  {name} allocates {size} bytes at {site}"


def _memory_table(figures: dict[str, Any]) -> Iterator[str]:
    yield "MiB of the fullest rank, above those before the model; live: given out by malloc, looked at every ms"
    yield (
        f"{'':<16}{'peak live':>11}{'peak resident':>15}{'peak while wrapping':>21}{'live after':>12}"
        f"{'resident after':>16}{'optimizer':>11}"
    )
    for name, one in figures.items():
        memory = one["memory"]
        yield (
            f"{name:<16}{memory['peak_live'] / MIB:>11.1f}{memory['peak_resident'] / MIB:>15.1f}"
            f"{memory['peak_wrapping'] / MIB:>21.1f}{memory['live_after'] / MIB:>12.1f}"
            f"{memory['resident_after'] / MIB:>16.1f}{memory['optimizer_state'] / MIB:>11.1f}"
        )


def _target_table(found: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'target':<54}{'ours':>11}{'rival':>11} {'':<10}{'ratio':>7}{'must be':>9}"
    for each in found:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        limit = {"none": "0", "the plan": "equal"}.get(each["rival"], f"≤ {each['limit']:.1f}")
        yield (
            f"{each['what']:<54}{_number(each['ours']):>11}{_number(each['theirs']):>11} {each['rival']:<10}{ratio:>7}"
            f"{limit:>9}{'' if each['met'] else '  no'}"
        )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}"
