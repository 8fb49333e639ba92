"""The training run of ``bench.faults``: a small language model, whose weights in the end are told apart by a digest."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import yafsdp_cc
from yafsdp_cc.tools.demo.model import GPT
from yafsdp_cc.tools.demo.train import loss_of


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; return its number of steps."""
    try:
        return int(yafsdp_cc.load(path, model, optimizer)["step"])
    except FileNotFoundError:
        return 0


def main() -> None:
    """Train ``STEPS`` steps, of which a kill costs ``EVERY`` at most; write finished steps and a digest to a folder."""
    folder, steps = Path(sys.argv[1]), int(os.environ["STEPS"])
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = GPT()
    yafsdp_cc.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    drawn = torch.Generator().manual_seed(dist.get_rank())
    every = int(os.environ.get("EVERY", "5"))
    on_disk, save_every = folder / "checkpoint", int(os.environ.get("SAVE_EVERY", "0"))
    path = on_disk if save_every else None
    rescue = yafsdp_cc.Rescue(
        model, optimizer, every=every, path=path, save_every=save_every, drawn=drawn, scheduler=scheduler
    )
    disk = on_disk if os.environ.get("MODE") == "disk" else None
    begin = rescue.restore() if disk is None else load(disk, model, optimizer)
    for step in range(begin, steps):
        loss_of(model, torch.randint(256, (1, 65), generator=drawn)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if disk is None:
            rescue.step()
        elif (step + 1) % every == 0:
            yafsdp_cc.save(disk, model, optimizer, step=step + 1, drawn=drawn.get_state())
        if dist.get_rank() == 0:
            (folder / "steps.part").write_text(f"{step + 1} {os.getpid()}")
            os.replace(folder / "steps.part", folder / "steps")
    digest = hashlib.sha256()
    for each in yafsdp_cc.full_state_dict(model).values():
        digest.update(each.numpy().tobytes())
    if dist.get_rank() == 0:
        (folder / "digest.part").write_text(digest.hexdigest())
        os.replace(folder / "digest.part", folder / "digest")


if __name__ == "__main__":
    main()
