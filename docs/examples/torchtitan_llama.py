"""The Trainer of torchtitan on the debug model of its Llama 3, sharded by yafsdp_cc.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/torchtitan_llama.py

In a model registry of your own, which `--module` names, it is one line:

    return dataclasses.replace(llama3.model_registry(flavor), parallelize_fn=yafsdp_cc.integrations.titan.parallelize)
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 expects a torch after 2.13
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
if not torch.cuda.is_available():  # torchtitan takes "cuda" where there is no accelerator, and asks it for its memory
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.tools.utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        device_count=torch.cpu.device_count,
        current_device=lambda: 0,
        synchronize=torch.cpu.synchronize,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**30),
        reset_peak_memory_stats=lambda: None,
        memory_stats=lambda device: {},
        empty_cache=lambda: None,
    )

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry

from yafsdp_cc.integrations.titan import parallelize

DATASETS["paragraphs"] = DatasetConfig(  # of a text that is on every machine
    path=json.__file__,
    loader=lambda path: Dataset.from_dict({"text": Path(path).read_text(encoding="utf-8").split("\n\n")}),
    sample_processor=lambda sample: sample["text"],
)


def make_tokenizer(folder):
    """Write files of a tokenizer whose tokens are bytes."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(tokens[-2:])
    tokenizer.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}', encoding="utf-8")


def make_config(folder, parallelize_fn=parallelize):
    """Return the configuration of a run that writes to ``folder``, and goes on from the last checkpoint there."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize_fn)
    if not torch.cuda.is_available():  # FlexAttention has no backward on CPUs
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = config.hf_assets_path = folder
    config.dataloader.dataset = config.validator.dataloader.dataset = "paragraphs"
    config.training = TrainingConfig(
        local_batch_size=2,
        seq_len=64,
        steps=4,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,  # the engine cannot be captured
    )
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.validator.enable, config.validator.freq, config.validator.steps = True, 4, 1
    return config


def train(config):
    """Train, and return the Trainer, with the loss and the norm of the gradient in each step, and losses validated."""
    trainer = config.build()
    losses, validated, metrics = [], [], trainer.metrics_processor
    log, log_validation = metrics.log, metrics.log_validation

    def record(step, loss, largest, norm, **more):
        losses.append((step, loss, norm))
        log(step, loss, largest, norm, **more)

    def record_validation(loss, step):
        validated.append((step, loss))
        log_validation(loss, step)

    metrics.log, metrics.log_validation = record, record_validation
    trainer.train()
    trainer.close()
    return trainer, losses, validated


if not dist.is_initialized():
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
shared = [tempfile.mkdtemp()]
dist.broadcast_object_list(shared)
folder = shared[0]
if dist.get_rank() == 0:
    make_tokenizer(folder)
dist.barrier()
trainer, losses, validated = train(make_config(folder))
if dist.get_rank() == 0:
    print("losses", " ".join(f"{loss:.4f}" for _, loss, _ in losses))
