"""``generate`` of transformers with its cache classes: the tokens of ``eager``, greedily chosen.

A cache decides which keys an attention call gets, and which of them are unused or have been
dropped; its layers follow the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import annulus_attention as annulus

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_transformers import build  # noqa: E402  (imports transformers)
from transformers import cache_utils  # noqa: E402

import annulus_attention.torch  # noqa: E402  (imports torch)

torch.set_num_threads(1)
NEW, PADDED = 8, 4
"""Tokens that are generated after a prompt of 12: both pass the windows and chunks of 4 and 5."""

CLASSES = (
    "BartForConditionalGeneration",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "Inkling2ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "Zamba2ForCausalLM",
)
WITHOUT_STATIC = {"DeepseekV4ForCausalLM", "Inkling2ForCausalLM"}
"""Classes that fail with a static cache, by ``eager`` as well."""
SPECULATIVE = {"MtpCache", "DFlashCache"}
"""Caches of draft models, which transformers reads from files of trained weights."""
WITH_PACKAGES = {"QuantizedLayer", "QuantoQuantizedLayer", "HQQQuantizedLayer"}
"""Layers that store keys by packages of their own; they return keys as ``Fp8QuantizedLayer``."""
FAILS = {"LinearAttentionAndStaticSlidingWindowAttentionLayer"}
"""A layer of a class in WITHOUT_STATIC only."""

seen: set[str] = set()
"""Names of the caches and layers of all tests so far."""


def generate(model: Any, given: dict[str, Any], **options: Any) -> Any:
    """Generates greedily, and notes the classes of the cache."""
    options = {"use_cache": True, **options}
    with torch.no_grad():
        result = model.generate(
            **given,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
            **options,
        )
    assert (result.past_key_values is not None) == options["use_cache"]
    for part in parts(result.past_key_values):
        seen.update(cls.__name__ for cls in type(part).__mro__)
    return result


def parts(kept: Any) -> Iterator[Any]:
    """Yields a cache and all objects that it consists of."""
    if kept is None:
        return
    yield kept
    if isinstance(kept, cache_utils.EncoderDecoderCache):
        yield from parts(kept.self_attention_cache)
        yield from parts(kept.cross_attention_cache)
    else:
        yield from kept.layers


def made(name: str, *, padded: bool) -> tuple[Any, dict[str, Any]]:
    """Returns a model that generates, and its prompt."""
    annulus.torch.register()
    model, given = build(name)
    given.pop("decoder_input_ids", None)
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = None
    config.pad_token_id = 0
    config.decoder_start_token_id = config.decoder_start_token_id or 1
    if padded and "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, :PADDED] = 0
    return model, given


def compare(model: Any, given: dict[str, Any], make_options: Any = dict) -> Any:
    """Generates by eager and by annulus, compares, and returns the tokens."""
    results = []
    for name in ("eager", "annulus"):
        model.set_attn_implementation(name)
        results.append(generate(model, given, **make_options()))
    want, got = results
    assert got.sequences.shape[1] >= NEW and torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-3 * float(other.abs().max()))
    return got.sequences


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_tokens_with_growing_and_static_caches(name: str, padded: bool) -> None:
    with_caches(name, padded)


@cache
def with_caches(name: str, padded: bool) -> None:
    model, given = made(name, padded=padded)
    tokens = compare(model, given)
    assert torch.equal(compare(model, given, lambda: {"use_cache": False}), tokens)
    if name not in WITHOUT_STATIC:
        static = {"cache_implementation": "static"}
        assert torch.equal(compare(model, given, lambda: static), tokens)


@cache
def test_tokens_with_a_quantized_cache() -> None:
    model, given = made("LlamaForCausalLM", padded=True)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    compare(model, given, lambda: options)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_caches_of_the_caller(name: str) -> None:
    model, given = made(name, padded=True)
    tokens = compare(model, given)
    # of the model's layers, of whole layers only, and longer than the sequence
    for make in (
        lambda: cache_utils.DynamicCache(config=model.config),
        cache_utils.DynamicCache,
        lambda: cache_utils.StaticCache(config=model.config, max_cache_len=37),
    ):
        assert torch.equal(compare(model, given, lambda make=make: {"cache": make()}), tokens)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Llama4ForCausalLM"])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_in_parts(name: str, static: bool) -> None:
    model, given = made(name, padded=True)
    tokens = compare(model, given)
    options: dict[str, Any] = {"prefill_chunk_size": 5}
    if static:
        options["cache_implementation"] = "static"
    assert torch.equal(compare(model, given, lambda: options), tokens)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BartForConditionalGeneration"])
def test_beams_reorder_a_cache(name: str) -> None:
    model, given = made(name, padded=True)
    compare(model, given, lambda: {"num_beams": 3})


def test_a_draft_model_crops_the_cache() -> None:
    model, given = made("LlamaForCausalLM", padded=False)
    draft, _ = made("LlamaForCausalLM", padded=False)
    draft.set_attn_implementation("annulus")
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1.05)
    given = {"input_ids": given["input_ids"][:1]}
    tokens = compare(model, given)
    assert torch.equal(compare(model, given, lambda: {"assistant_model": draft}), tokens)


def test_every_class_of_caches_was_used() -> None:
    for name in CLASSES:
        with_caches(name, True)
    test_tokens_with_a_quantized_cache()
    # a class that a later transformers adds fails here
    classes = {
        one.__name__
        for name, one in vars(cache_utils).items()
        if inspect.isclass(one)
        and one.__module__ == cache_utils.__name__
        and ("Cache" in name or "Layer" in name)
    }
    assert classes - seen == SPECULATIVE | WITH_PACKAGES | FAILS
