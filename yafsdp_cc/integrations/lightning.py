"""A callback with which Lightning's Trainer writes ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from yafsdp_cc.tools.metrics import Metrics

if TYPE_CHECKING:
    from lightning.pytorch import Callback


def metrics_callback(folder: str | Path, **options: Any) -> Callback:
    """Return a callback for Lightning's ``Trainer(callbacks=[...])`` that writes ``metrics.jsonl``.

    The loss of a step is what ``training_step`` returns for its last micro-batch. Scalars that a validation logs are
    written when the validation ends. A resumed run counts on from Lightning's ``global_step``, which counts the steps
    of several optimizers one by one.

    Args:
        options: arguments of ``yafsdp_cc.Metrics``; ``every`` counts optimizer steps.
    """
    from lightning.pytorch import Callback

    class WriteMetrics(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.estimated_stepping_batches
            made = {"first_step": trainer.global_step, "total_steps": int(steps) if 0 < steps < float("inf") else None}
            self.metrics = Metrics(pl_module, folder, **made | options)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            # skip a micro-batch after which Lightning has made no optimizer step
            if trainer.global_step > self.metrics.steps_made:
                loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                # Lightning hands over the loss divided by the number of micro-batches
                self.metrics.step(loss if loss is None else loss * trainer.accumulate_grad_batches)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            # ask ``fn`` whether this is a validation of ``fit``: ``trainer.training`` is False in every validation
            if trainer.state.fn == "fit" and not trainer.sanity_checking:
                figures = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
                self.metrics.record(**figures)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.metrics.close()

    return WriteMetrics()
