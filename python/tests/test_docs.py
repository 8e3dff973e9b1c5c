"""Runs the Python examples of README.md and docs/python.md as they are printed.

    python tests/test_docs.py [mpi] [torch]

Each paragraph of a fenced block runs, in order and in one namespace per page, unless it needs what
is not named: `mpi` for a communicator, `torch` for models and tensors. Those in device memory are
only compiled.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

HAS_TORCH = importlib.util.find_spec("torch") is not None
ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "### Python", "docs/python.md": "# Python", "python/README.md": "# annulus-attention"}
LENGTHS = {"q_len": 64, "q_heads": 4, "head_dim": 16}
TOKENS = 4096
"""Length of the sequence that the examples shard."""


def paragraphs(page: str, heading: str) -> list[str]:
    """The paragraphs of the Python blocks in a section and the sections below it."""
    level = heading.index(" ")
    text = (ROOT / page).read_text(encoding="utf-8").split(f"{heading}", 1)[1]
    if level > 1:
        text = text.split(f"\n{heading[:level]} ", 1)[0]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [part for block in blocks for part in block.split("\n\n")]


def needs(text: str) -> set[str]:
    """What a paragraph needs beside the package and NumPy."""
    found = set()
    if "cuda" in text.lower():
        found.add("gpu")
    if re.search(r"\b(comm|endpoint|MPI)\b", text):
        found.add("mpi")
    if re.search(r"\b(torch|model)\b", text):
        found.add("torch")
    return found


def tensors(text: str) -> dict[str, Any]:
    """Inputs of the lengths that a paragraph names."""
    named = {name: int(number) for name, number in re.findall(r"\b(\w+)=(\d+)", text)}
    given = {**LENGTHS, **named}
    rows, heads, dim = given["q_len"], given["q_heads"], given["head_dim"]
    kv_heads = given.get("kv_heads", heads)
    return {
        "query": random(1, rows, heads, dim),
        "key": random(1, rows, kv_heads, dim, seed=1),
        "value": random(1, rows, kv_heads, dim, seed=2),
        "dout": random(1, rows, heads, dim, seed=3),
        "dlse": random(1, heads, rows, seed=4),
    }


def models() -> dict[str, Any]:
    """A model of token and position ids for torch's examples, and a configuration for those of
    transformers.
    """
    import torch
    from transformers import LlamaConfig

    class Model(torch.nn.Module):
        def forward(self, tokens: Any, positions: Any) -> Any:
            x = (tokens + positions)[:, None, :, None] / float(TOKENS)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    sizes: dict[str, Any] = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config = LlamaConfig(vocab_size=16, num_attention_heads=1, num_key_value_heads=1, **sizes)
    tokens = torch.arange(TOKENS)[None] % 16
    return {"torch": torch, "model": Model(), "config": config, "tokens": tokens}


def namespace(have: set[str]) -> dict[str, Any]:
    """Names that the examples take from their reader's program."""
    names: dict[str, Any] = {"annulus": annulus, "work": lambda: None}
    if "mpi" in have:
        from mpi4py import MPI

        layers = [annulus.Attention(causal=True), annulus.Attention(sliding_window=(8, 0))]
        lengths = dict(batch=1, q_len=8, q_heads=1, head_dim=8)
        names |= {"comm": MPI.COMM_WORLD, "layers": layers, "lengths": lengths}
    if "torch" in have:
        from transformers import AutoModelForCausalLM

        names |= {**models(), "AutoModelForCausalLM": AutoModelForCausalLM}
    return names


def run(page: str, have: set[str]) -> int:
    """Runs the paragraphs of a page that need nothing else, and returns their number."""
    names, count = namespace(have), 0
    for text in paragraphs(page, PAGES[page]):
        code = compile(text, f"<{page}: {text.splitlines()[0]}>", "exec")
        if not needs(text) <= have:
            continue
        # later paragraphs go on with the tensors of earlier ones, unless they name other lengths
        if "query" not in names or re.search(r"\bq_heads=\d", text):
            names |= tensors(text)
        exec(code, names)
        count += 1
    return count


@pytest.mark.parametrize("page", list(PAGES))
def test_examples_run(page: str) -> None:
    assert run(page, set()) >= 1


@needs_mpi
@pytest.mark.parametrize(
    "have",
    ["mpi", pytest.param("mpi torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="no torch"))],
)
def test_examples_run_over_mpi(have: str) -> None:
    # one rank has the rows of all, so that examples may pass whole arrays or those of their rank
    said = launch(1, "test_docs.py", program_arguments=have.split())
    assert all(page in said for page in PAGES)


def test_only_examples_in_device_memory_never_run() -> None:
    every = [text for page, heading in PAGES.items() for text in paragraphs(page, heading)]
    assert len(every) >= 15
    assert sum("gpu" in needs(text) for text in every) == 2


if __name__ == "__main__":
    have = set(sys.argv[1:])
    print({page: run(page, have) for page in PAGES})
