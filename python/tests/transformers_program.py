"""One rank of an MPI program: models of transformers that are sharded over mpi4py, against one
process.

mpirun -n 2 python tests/transformers_program.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from helpers import run_rank
from models_program import (
    DIM,
    HEADS,
    LENGTH,
    RANK,
    RANKS,
    WORDS,
    WORLD,
    compare,
    fails,
    shard,
    whole,
)
from test_torch_models import tiny
from tiny_transformers import build

import annulus_attention as annulus
import annulus_attention.torch


def sharded(model: Any, words: Any, own: Any) -> Any:
    """Logits of this rank's rows, of a model of transformers."""
    positions = torch.from_numpy(own.q_positions)[None]
    with annulus.torch.context_parallel(own, WORLD, threads=1):
        return model(words[:, own.q_rows], position_ids=positions, use_cache=False).logits


CLASSES = (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GPT2LMHeadModel",
    "Glm4ForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Classes of transformers: windows, chunks, soft caps, sinks, latent keys, experts."""


def transformers_models() -> None:
    """Models of transformers: logits and gradients of all parameters, over the ranks."""
    words = torch.randint(5, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    wrong = []
    for name in CLASSES:
        model, _ = build(name)
        model.set_attn_implementation("eager")
        logits = model(words, use_cache=False).logits
        want = [logits, *gradients_of(logits, model, whole=True)]
        for layout in ("contiguous", "zigzag", "striped", "custom"):
            own = shard(layout)
            model.set_attn_implementation("annulus")
            logits = sharded(model, words, own)
            got = [whole(logits, own.q_rows), *gradients_of(logits, model)]
            parameters = [key for key, one in model.named_parameters() if one.grad is not None]
            for key, one, other in zip(["logits", *parameters], got, want, strict=True):
                off = abs(one - other).max() / max(abs(other).max(), 1e-3)
                if not off < 2e-3:
                    wrong.append((name, layout, key, off.item()))
    assert not wrong, wrong


def gradients_of(logits: Any, model: Any, *, whole: bool = False) -> list[Any]:
    """Gradients of all parameters that have one, summed over the ranks unless whole."""
    model.zero_grad()
    logits.square().sum().backward()
    own = [one.grad for one in model.parameters() if one.grad is not None]
    return own if whole else [torch.from_numpy(WORLD.allreduce(one.numpy())) for one in own]


def transformers_refusals() -> None:
    """What cannot be sharded is refused, by all ranks if one has to."""
    words = torch.randint(5, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    own = shard("zigzag")
    positions = torch.from_numpy(own.q_positions)[None]
    model = tiny(transformers, "LlamaConfig")
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        fails(annulus.Unsupported, "attn_implementation", partial(sharded, model, words, own))
    model.set_attn_implementation("annulus")

    def run(**options: Any) -> Any:
        options = {"position_ids": positions, "use_cache": False, **options}
        with annulus.torch.context_parallel(own, WORLD, threads=1):
            return model(words[:, own.q_rows], **options).logits

    if RANKS == 1:
        return
    # one rank has wrong positions: no rank waits for it, and the next call is right
    wrong = positions + (RANK == 1)
    fails(annulus.Error, "position_ids", lambda: run(position_ids=wrong))
    square = torch.ones(2, 1, len(own.q_rows), len(own.q_rows), dtype=torch.bool)
    fails(annulus.Error, "attention_mask", lambda: run(attention_mask=square))
    fails(annulus.Error, "output_attentions", lambda: layer_of(own, output_attentions=RANK == 0))
    # a mask of this rank's queries × all keys
    causal = torch.from_numpy(own.q_positions)[:, None] >= torch.arange(LENGTH)
    got = run(attention_mask=causal.expand(2, 1, -1, -1))
    compare([got], [run()], 1e-4)


def layer_of(own: Any, **options: Any) -> Any:
    """Attention of a layer without a model."""
    q = torch.randn(1, HEADS, len(own.q_rows), DIM)
    with annulus.torch.context_parallel(own, WORLD, threads=1):
        return annulus.torch.attention_forward(None, q, q, q, **options)


def padded_models() -> None:
    """Padding on either side: pooled padded tokens, and chunks that count from the first token."""
    words = torch.randint(5, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for name in ("SiglipTextModel", "Llama4ForCausalLM", "MistralForCausalLM", "BertModel"):
        model, _ = build(name)
        for side in (slice(0, 17), slice(LENGTH - 17, LENGTH)):
            padding = torch.ones_like(words)
            padding[1, side] = 0
            for layout in ("contiguous", "zigzag"):
                own = shard(layout)
                positions = {"position_ids": torch.from_numpy(own.q_positions)[None]}
                model.set_attn_implementation("sdpa")
                want = model(words, attention_mask=padding)[0]
                model.set_attn_implementation("annulus")
                with annulus.torch.context_parallel(own, WORLD, threads=1):
                    got = model(
                        words[:, own.q_rows], attention_mask=padding[:, own.q_rows], **positions
                    )[0]
                compare([whole(got, own.q_rows)], [want], 1e-3)


def main() -> None:
    torch.set_num_threads(1)
    annulus.torch.register()
    transformers_refusals()
    padded_models()
    transformers_models()


if __name__ == "__main__":
    run_rank(main, WORLD)
