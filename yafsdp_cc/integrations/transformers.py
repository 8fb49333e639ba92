"""Makes the Trainer of Hugging Face Transformers train a model that is sharded already, and save its shards."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from yafsdp_cc.fsdp2.module import MANAGED, ShardedModule, class_of
from yafsdp_cc.integrations.accelerate import accept_sharded
from yafsdp_cc.tools.metrics import Metrics

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

AnyTrainer = TypeVar("AnyTrainer", bound="Trainer")


def accept_sharded_model(trainer: AnyTrainer) -> AnyTrainer:
    """Let ``trainer`` train its model, which ``yafsdp_cc.shard`` has sharded, as it would train one of FSDP2.

    The trainer then makes its optimizer from the sharded parameters, wraps nothing, writes and resumes checkpoints of
    ``torch.distributed.checkpoint``, and ``trainer.save_model()``, to be called on every rank, writes unsharded weights
    for ``from_pretrained``. ``generate`` of the model goes on until all ranks are done, unless it is passed
    ``synced_gpus=False``. Call ``accept_sharded_model`` before ``trainer.train()``; it returns ``trainer``.
    """
    from transformers import TrainerCallback

    accept_sharded(trainer.accelerator, trainer.model)
    trainer.is_fsdp_enabled = True
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)  # prepare for an evaluate() before train()

    class KeepGenerate(TrainerCallback):  # type: ignore[misc]
        """Restore ``generate`` after the Trainer has replaced it by one for FSDP2, which needs FSDP2's own state."""

        def on_train_begin(self, *_: object, model: nn.Module, **__: object) -> None:
            _run_together(model)

    _run_together(trainer.model)
    # Let ``_get_name`` name the unsharded class: the Trainer's label smoothing shifts labels only for names it knows.
    trainer.model.__dict__["_get_name"] = functools.partial(str, class_of(trainer.model).__name__)
    trainer.add_callback(KeepGenerate())
    save = trainer.save_model

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call:
            # The Trainer makes a checkpoint's folder only after each rank has looked which checkpoint is the best.
            # Without the folder ranks could choose different checkpoints, and load parts of two at the end.
            os.makedirs(output_dir or trainer.args.output_dir, exist_ok=True)
        else:  # on a user's call the Trainer itself would silently write nothing
            trainer._save(output_dir, state_dict=trainer.accelerator.get_state_dict(trainer.model))
        save(output_dir, _internal_call)

    trainer.save_model = save_model
    return trainer


def _run_together(model: nn.Module) -> None:
    """Make ``generate`` and LayerDrop call the model's units equally often on every rank.

    Transformers looks for the attribute ``MANAGED``: ``Seq2SeqTrainer`` and ``generate`` on the model, LayerDrop on the
    module that holds the layers. Units and modules in them do not get it: torch.compile refuses modules with it.
    """
    model.__dict__.pop("generate", None)
    units = {module for module in model.modules() if isinstance(module, ShardedModule)} - {model}
    for module in model.modules():
        if module not in units and (module is model or not units.isdisjoint(module.modules())):
            module.__dict__[MANAGED] = True


def metrics_callback(folder: str | Path, **options: Any) -> TrainerCallback:
    """Return a callback for ``Trainer(callbacks=[...])`` that writes ``metrics.jsonl``.

    The callback reports when the Trainer logs (``logging_steps``), with the Trainer's mean loss since it last logged.

    Args:
        options: arguments of ``yafsdp_cc.Metrics``, except ``every``.
    """
    from transformers import TrainerCallback

    class WriteMetrics(TrainerCallback):  # type: ignore[misc]
        metrics: Metrics | None = None
        """Metrics of the training that has begun; None before ``train``, when ``Trainer.evaluate`` may log already."""

        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
            made = {"first_step": state.global_step, "total_steps": state.max_steps, "every": 0}
            self.metrics = Metrics(model, folder, **options | made)

        def on_step_end(self, *_: object, **__: object) -> None:
            assert self.metrics is not None
            self.metrics.step()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            figures = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            if self.metrics is None:
                return
            if "loss" in figures:
                self.metrics.report(**figures)
            elif any(name.startswith("eval_") for name in figures):  # a set NAME has eval_NAME_loss
                known = {"val_loss": figures.pop("eval_loss")} if "eval_loss" in figures else {}
                self.metrics.record(**known, **figures)

        def on_train_end(self, *_: object, **__: object) -> None:
            assert self.metrics is not None
            self.metrics.close()

    return WriteMetrics()
