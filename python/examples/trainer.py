"""Training by the Trainer of transformers, over the ranks of mpi4py: each process has its rows of
every sequence, and all processes have the same model, batches, gradients and loss.

mpirun -n 3 python python/examples/trainer.py
python python/examples/trainer.py eager      # one process, to compare with
"""

import os
import sys
import tempfile

import torch
import transformers
from mpi4py import MPI

import annulus_attention as annulus
import annulus_attention.torch

comm, length = MPI.COMM_WORLD, 96
attention = sys.argv[1] if len(sys.argv) > 1 else "annulus"
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
    os.environ.pop(name, None)  # else accelerate gives each process other sequences
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
annulus.torch.register()
shard = annulus.Attention(causal=True).shard(length, comm=comm, layout="zigzag")
rows, positions = torch.from_numpy(shard.q_rows), torch.from_numpy(shard.q_positions)[None]


class SequenceTrainer(transformers.Trainer):
    """A Trainer whose processes share each sequence."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if attention != "annulus":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        following = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        own = {
            "input_ids": inputs["input_ids"][:, rows],
            "labels": inputs["labels"][:, rows],
            "shift_labels": following[:, rows],  # the next token may be another rank's
            "position_ids": positions,
        }
        with annulus.torch.context_parallel(shard, comm):
            return super().compute_loss(model, own, return_outputs, num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:  # after the last batch that is accumulated
            for parameter in model.parameters():
                comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
        return torch.tensor(comm.allreduce(loss.item()))


def train(kind: str, **options) -> None:
    """Trains a tiny model on sequences that repeat, and prints loss and norm of each step."""
    transformers.set_seed(0)  # equal parameters on all ranks
    config = getattr(transformers, kind + "Config")(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        use_cache=False,
        attn_implementation=attention,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    words = torch.randint(32, (12, 8)).repeat(1, length // 8)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            max_grad_norm=1.0,
            max_steps=6,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        data = [{"input_ids": row, "labels": row} for row in words]
        trainer = SequenceTrainer(model, arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    for step in trainer.state.log_history[:-1]:
        if comm.rank == 0:
            print(kind, f"norm {step['grad_norm']:.6f} loss {step['loss']:.6f}")


train("Llama", learning_rate=0.01)
train("Gemma2", learning_rate=0.3, optim="sgd", bf16=True)  # windows, soft caps, autocast
