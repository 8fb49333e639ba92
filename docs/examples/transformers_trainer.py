"""A Transformers model sharded by yafsdp_cc, trained by the Trainer.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/transformers_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import yafsdp_cc
from yafsdp_cc.integrations.transformers import accept_sharded_model, metrics_callback


def make_model():
    torch.manual_seed(0)  # the same on every rank
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def make_data():
    tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


model = yafsdp_cc.shard(make_model())
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
arguments = TrainingArguments(
    output_dir=folder[0],
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=4,
    max_steps=4,
    train_sampling_strategy="sequential",
    learning_rate=1e-3,
    max_grad_norm=0.5,
    activation_checkpointing=True,
    activation_checkpointing_kwargs={"use_reentrant": False},
    save_steps=2,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
)
log = metrics_callback(folder[0])  # yafsdp-cc report shows what it writes
trainer = accept_sharded_model(Trainer(model, arguments, train_dataset=make_data(), callbacks=[log]))
trainer.train()
trainer.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-2")  # the last two steps once more, from saved shards
trainer.save_model(f"{folder[0]}/whole")  # full weights, for from_pretrained
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if dist.get_rank() == 0:
    print("losses", losses)
