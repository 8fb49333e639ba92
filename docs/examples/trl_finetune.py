"""A model sharded by yafsdp_cc, fine-tuned by the SFTTrainer of TRL and then by its GRPOTrainer.

yafsdp-cc launch --standalone --nproc-per-node=2 docs/examples/trl_finetune.py
"""

import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import yafsdp_cc
from yafsdp_cc.integrations.transformers import accept_sharded_model

LETTERS = "abcdefghijklmnop"


def make_tokenizer():
    tokens = ["<pad>", "<eos>", *LETTERS, " "]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model():
    torch.manual_seed(0)  # the same on every rank
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def make_data():
    return Dataset.from_dict({"prompt": [f"{c} " for c in LETTERS], "completion": [c * 3 for c in LETTERS]})


def reward(completions, **columns):
    return [float(completion.count("a") - len(completion)) for completion in completions]


model = yafsdp_cc.shard(make_model())
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
common = {
    "use_cpu": not torch.cuda.is_available(),
    "bf16": False,  # autocast; dtypes of weights and communication are those of shard(mp_policy=...)
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
arguments = SFTConfig(
    f"{folder[0]}/sft",
    per_device_train_batch_size=2,
    max_steps=4,
    learning_rate=1e-3,
    train_sampling_strategy="sequential",
    activation_checkpointing_kwargs={"use_reentrant": False},
    save_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    **common,
)
data, tokenizer = make_data(), make_tokenizer()
sft = SFTTrainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
accept_sharded_model(sft).train()
sft.train(resume_from_checkpoint=f"{folder[0]}/sft/checkpoint-2")  # the last two steps once more, from saved shards
sft.save_model(f"{folder[0]}/tuned")  # full weights, for from_pretrained
losses = [entry["loss"] for entry in sft.state.log_history if "loss" in entry]

dist.barrier()
model = yafsdp_cc.shard(LlamaForCausalLM.from_pretrained(f"{folder[0]}/tuned"))
arguments = GRPOConfig(
    f"{folder[0]}/grpo",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    beta=0.04,  # against a reference model, which TRL loads from the same folder
    max_steps=1,
    learning_rate=0.1,
    optim="sgd",
    save_strategy="no",
    **common,
)
grpo = accept_sharded_model(GRPOTrainer(model, reward, arguments, train_dataset=data, processing_class=tokenizer))
grpo.train()
if dist.get_rank() == 0:
    print("losses of SFT", losses)
    print("mean reward before GRPO's step", grpo.state.log_history[0]["reward"])
