"""scaled_dot_product_attention against that of torch, and the interface of transformers."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

torch = pytest.importorskip("torch")

import annulus_attention.torch  # noqa: E402  (imports torch)

torch.set_num_threads(1)
F = torch.nn.functional
L, S = 9, 13


def tensor(*shape: int, seed: int) -> Any:
    return torch.tensor(random(*shape, seed=seed, dtype="f8"), requires_grad=True)


def qkv(q_heads: int = 4, kv_heads: int = 4) -> tuple[Any, Any, Any]:
    return (
        tensor(2, q_heads, L, 8, seed=1),
        tensor(2, kv_heads, S, 8, seed=2),
        tensor(2, kv_heads, S, 5, seed=3),
    )


MASK = torch.tensor(random(2, 1, L, S, seed=7)) > 0
MASK[..., 0] = True
CASES: dict[str, Any] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "pairs": {"attn_mask": MASK[0, 0]},
    "padding": {"attn_mask": MASK[:, :, :1]},
    "batch": {"attn_mask": MASK},
    "row of scores": {"attn_mask": tensor(S, seed=5)},
    "bias": {"attn_mask": tensor(2, 4, L, S, seed=6)},
    "shared bias": {"attn_mask": tensor(1, 4, 1, S, seed=6), "scale": 0.2},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_and_gradients_are_those_of_torch(name: str, kv_heads: int) -> None:
    inputs, options = qkv(kv_heads=kv_heads), {**CASES[name], "enable_gqa": kv_heads == 2}
    given = [*inputs]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        given.append(mask)
    results = []
    for function in (annulus.torch.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(*inputs, **options)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * weights).sum(), given)])
    assert len(results[0]) == 1 + len(given)
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-12)


def test_dropout_follows_the_generator_of_torch() -> None:
    inputs = qkv()

    def run(seed: int, p: float = 0.5) -> Any:
        torch.manual_seed(seed)
        return annulus.torch.scaled_dot_product_attention(*inputs, dropout_p=p)

    assert torch.equal(run(1), run(1)) and not torch.allclose(run(1), run(2))
    torch.manual_seed(1)
    one, two = (
        annulus.torch.scaled_dot_product_attention(*inputs, dropout_p=0.5) for _ in range(2)
    )
    assert torch.equal(one, run(1)) and not torch.allclose(one, two)
    mean = sum(run(seed) for seed in range(300)) / 300
    assert abs(mean - run(0, 0.0)).mean() < 0.05


def test_it_compiles_without_a_graph_break() -> None:
    q, k, v = qkv()

    def model(q: Any) -> Any:
        return annulus.torch.scaled_dot_product_attention(q * 2, k, v, MASK, dropout_p=0.5)

    torch.manual_seed(3)
    want = model(q)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(q), want)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"attn_mask": MASK, "is_causal": True}, "is_causal"),
        ({"is_causal": 1}, "is_causal"),
        ({"dropout_p": 1.1}, "dropout_p"),
        ({"scale": float("inf")}, "softmax_scale"),
        ({"attn_mask": MASK.int()}, "attn_mask"),
        ({"attn_mask": MASK[..., :-1]}, "attn_mask"),
        ({"attn_mask": MASK[None]}, "attn_mask"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(annulus.InvalidArgument) as caught:
        annulus.torch.scaled_dot_product_attention(*qkv(), **options)
    assert caught.value.argument == argument


def test_wrong_shapes_are_named() -> None:
    q, k, v = qkv(kv_heads=2)
    with pytest.raises(annulus.InvalidArgument, match="enable_gqa"):
        annulus.torch.scaled_dot_product_attention(q, k, v)


MODULE = SimpleNamespace(is_causal=True)


def test_a_layer_of_transformers() -> None:
    q, k, v = (tensor(2, heads, L, 8, seed=heads) for heads in (4, 2, 1))
    v = k * 2
    sinks = tensor(4, seed=4)
    padding = torch.ones(2, L, dtype=torch.int64)
    padding[1, :3] = 0
    out, weights = annulus.torch.attention_forward(
        MODULE,
        q,
        k,
        v,
        padding,
        scaling=0.3,
        sliding_window=4,
        softcap=2.0,
        s_aux=sinks,
        use_cache=False,
        output_attentions=False,
    )
    want = annulus.torch.flash_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        q_segment_ids=padding - 1,
        softmax_scale=0.3,
        causal=True,
        sliding_window=(3, 0),
        logits_soft_cap=2.0,
        softmax_aux=sinks[:, None],
    )
    assert weights is None and torch.equal(out, want)
    # a cache: the queries are the last tokens
    last, _ = annulus.torch.attention_forward(MODULE, q[:, :, -2:], k, v, None, is_causal=True)
    full, _ = annulus.torch.attention_forward(MODULE, q, k, v, None)
    assert torch.allclose(last, full[:, -2:], atol=1e-12)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"head_mask": torch.ones(1)}, "head_mask"),
        ({"attention_mask": torch.zeros(2, 1, L, L - 1)}, "attention_mask"),
        ({"attention_mask": torch.zeros(2, 1, L, L, dtype=torch.int64)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, L + 1)}, "attention_mask"),
        ({"position_bias": torch.zeros(4, L, L)}, "position_bias"),
        ({"indices": torch.zeros(2, L)}, "indices"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"sinks": torch.zeros(2, 4, L, 1)}, "sinks"),
        ({"is_causal": False, "sliding_window": 3}, "sliding_window"),
        ({"position_ids": torch.arange(L)[None] % 5}, "position_ids"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_mask": annulus.torch.MaskPattern(True, 3), "sliding_window": 4}, "sliding"),
        ({"attention_mask": annulus.torch.MaskPattern(True), "is_causal": False}, "is_causal"),
    ],
)
def test_arguments_of_a_layer_are_never_ignored(options: dict[str, Any], argument: str) -> None:
    q = tensor(2, 4, L, 8, seed=1)
    with pytest.raises(annulus.Error, match=argument):
        annulus.torch.attention_forward(MODULE, q, q, q, **options)
    chunked = SimpleNamespace(
        layer_idx=1, config=SimpleNamespace(layer_types=["full_attention", "chunked_attention"])
    )
    with pytest.raises(annulus.Unsupported, match="chunked"):
        annulus.torch.attention_forward(chunked, q, q, q)


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig", "Gemma2Config", "GptOssConfig"])
def test_models_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    annulus.torch.register()
    model = tiny(transformers, kind)
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[1, 33:] = 0
    packed = torch.cat([torch.arange(15), torch.arange(25)])[None]
    for options in ({}, {"attention_mask": padding}, {"position_ids": packed}):
        results = []
        for name in ("eager", "annulus"):
            model.set_attn_implementation(name)
            logits = model(ids, use_cache=False, **options).logits
            kept = logits[padding.bool()] if "attention_mask" in options else logits
            gradient = torch.autograd.grad(
                kept.square().mean(), model.get_input_embeddings().weight
            )
            results.append((kept, *gradient))
        for got, want in zip(*results, strict=True):
            assert torch.allclose(got, want, atol=1e-5), (options.keys(), abs(got - want).max())


def tiny(transformers: Any, kind: str) -> Any:
    """A model of two layers, of which one has a sliding window if the kind has one."""
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if kind != "LlamaConfig":
        options["sliding_window"] = 8
    if kind == "GptOssConfig":
        options |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = getattr(transformers, kind)(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        attention_dropout=0.0,
        pad_token_id=0,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def mask_of(transformers: Any, name: str, q_length: int, kv_length: int, **options: Any) -> Any:
    """A pattern as a mask function of transformers makes it, and the bools of sdpa."""
    masking = transformers.masking_utils
    function = {
        "causal": masking.causal_mask_function,
        "window": masking.sliding_window_causal_mask_function(4),
        "chunk": masking.chunked_causal_mask_function(4, options.pop("left", torch.zeros(2).int())),
        "both sides": masking.sliding_window_bidirectional_mask_function(3),
        "full": masking.bidirectional_mask_function,
        "union": masking.or_masks(
            masking.causal_mask_function,
            masking.blockwise_overlay(
                torch.tensor([[-1, 0, 0, 0, 1, 1, -1, 2, 2], [0, 0, -1, -1, 1, 1, 1, 1, -1]])
            ),
        ),
    }[name]
    given = {"mask_function": function, "batch_size": 2, **options}
    given |= {"q_length": q_length, "kv_length": kv_length}
    pattern = annulus.torch.mask_pattern(**given)
    return pattern, masking.sdpa_mask(**given, allow_is_causal_skip=False)


PADDING = torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
MASKS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "causal": ("causal", 9, 9, {}),
    "left padding": ("causal", 9, 9, {"attention_mask": PADDING}),
    "right padding": ("causal", 9, 9, {"attention_mask": PADDING.flip(1)}),
    "cache": ("causal", 3, 9, {"q_offset": 6}),
    "unused rows": ("causal", 3, 9, {"q_offset": 2}),
    "unused rows after the padding": (
        "causal",
        2,
        9,
        {"q_offset": torch.tensor(4), "attention_mask": PADDING[:, :6]},
    ),
    "cut cache of a window": ("window", 3, 6, {"q_offset": 10, "kv_offset": 7}),
    "cut cache of a chunk": ("chunk", 3, 6, {"q_offset": 10, "kv_offset": 7}),
    "chunk after padding": (
        "chunk",
        9,
        9,
        {"attention_mask": PADDING, "left": torch.tensor([0, 3])},
    ),
    "both sides": ("both sides", 9, 9, {"attention_mask": PADDING}),
    "other keys": ("full", 5, 9, {"attention_mask": PADDING}),
    "fewer keys": ("full", 9, 5, {"attention_mask": PADDING[:, 2:7]}),
    "union": ("union", 9, 9, {"attention_mask": PADDING}),
    "union of a batch": ("union", 9, 9, {}),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_pattern_masks_as_the_tensor_of_sdpa(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    function, q_len, kv_len, options = MASKS[name]
    pattern, mask = mask_of(transformers, function, q_len, kv_len, **options)
    q = tensor(2, 4, q_len, 8, seed=1)
    k, v = tensor(2, 2, kv_len, 8, seed=2), tensor(2, 2, kv_len, 8, seed=3)
    want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    want = want.where(mask.any(-1).transpose(1, 2)[..., None], 0.0)
    for given in (pattern, mask):
        out, _ = annulus.torch.attention_forward(MODULE, q, k, v, given)
        assert torch.allclose(out, want, atol=1e-12), name
    given = {**pattern.arguments}
    del given["batch_size"]
    out, _ = annulus.torch.attention_forward(MODULE, q, k, v, annulus.torch.mask_pattern(**given))
    assert torch.allclose(out, want, atol=1e-12), name
    # a model that reads elements of its mask gets those of sdpa
    assert torch.equal(pattern[:, 0], mask[:, 0]) and torch.equal(torch.cat([pattern], -1), mask)
    assert pattern.shape == mask.shape and torch.equal(~pattern, ~mask)


def test_a_pattern_that_is_added_to_scores_masks_them() -> None:
    transformers = pytest.importorskip("transformers")
    pattern, mask = mask_of(transformers, "causal", 5, 5)
    scores = tensor(2, 4, 5, 5, seed=1).detach()
    for added in (scores + pattern, pattern + scores):
        assert torch.equal(added.softmax(-1) > 0, mask.expand_as(added))


def test_a_pattern_of_other_lengths_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    pattern, _ = mask_of(transformers, "causal", 5, 5)
    q, k = tensor(2, 4, 5, 8, seed=1), tensor(2, 4, 7, 8, seed=2)
    with pytest.raises(annulus.InvalidArgument, match="attention_mask.*5 keys.*7 keys"):
        annulus.torch.attention_forward(MODULE, q, k, k, pattern)
    pattern, _ = mask_of(transformers, "full", 9, 9, attention_mask=PADDING)
    with pytest.raises(annulus.InvalidArgument, match="attention_mask.*padding"):
        annulus.torch.attention_forward(MODULE, q, k, k, pattern)


def test_tensors_of_pairs() -> None:
    q, k = tensor(2, 4, L, 8, seed=1), tensor(2, 4, S, 8, seed=2)
    bias, floats = tensor(1, 4, L, S, seed=3), tensor(2, 1, 1, S, seed=4)
    for mask in (MASK, MASK[:, :, :1], floats, None):
        for position_bias in (None, bias):
            parts = [one for one in (mask, position_bias) if one is not None]
            total = parts[0] if parts else None
            if len(parts) == 2:
                total = (
                    bias.where(mask, -torch.inf)
                    if mask is MASK or mask.dtype == torch.bool
                    else bias + mask
                )
            leaves = [q, k, *(one for one in parts if one.is_floating_point())]
            results = []
            module = SimpleNamespace(is_causal=False)
            options = {"position_bias": position_bias}
            got, _ = annulus.torch.attention_forward(module, q, k, k, mask, **options)
            for out in (got.transpose(1, 2), F.scaled_dot_product_attention(q, k, k, total)):
                weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
                results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
            for got, want in zip(*results, strict=True):
                assert torch.allclose(got, want, atol=1e-12)
    chosen = torch.randint(S, (2, L, 5), generator=torch.Generator().manual_seed(0))
    visible = torch.zeros(2, L, S, dtype=torch.bool).scatter(-1, chosen, True)[:, None]
    got, _ = annulus.torch.attention_forward(
        module, q, k, k, MASK, indices=torch.cat([chosen, chosen.new_full((2, L, 1), -1)], -1)
    )
    want, _ = annulus.torch.attention_forward(module, q, k, k, MASK & visible)
    assert torch.equal(got, want)


def test_arguments_without_effect_on_attention_pass() -> None:
    q = tensor(2, 4, L, 8, seed=1)
    want, _ = annulus.torch.attention_forward(MODULE, q, q, q)
    others = {"output_hidden_states": True, "return_dict": True, "logits_to_keep": 1}
    got, _ = annulus.torch.attention_forward(MODULE, q, q, q, **others, use_cache=True)
    assert torch.equal(got, want)
    # a layer without layer_idx, of a model with chunked layers elsewhere
    config = SimpleNamespace(layer_types=["full_attention", "chunked_attention"])
    got, _ = annulus.torch.attention_forward(SimpleNamespace(config=config), q, q, q)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name",
    [
        "AXK2ForCausalLM",
        "BartForConditionalGeneration",
        "BertModel",
        "DeepseekV4ForCausalLM",
        "Gemma4ForCausalLM",
        "Llama4ForCausalLM",
        "M2M100ForConditionalGeneration",
        "ModernBertModel",
        "SiglipModel",
        "T5ForConditionalGeneration",
        "T5GemmaForConditionalGeneration",
        "WhisperForConditionalGeneration",
    ],
)
def test_classes_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers_cases import Sweep

    sweep = Sweep(name)
    assert sweep.compare() == "equal" and len(sweep.rows) >= 6, sweep.rows


def test_cross_attention_of_any_lengths() -> None:
    transformers = pytest.importorskip("transformers")
    annulus.torch.register()
    from tiny_transformers import build

    model, _ = build("MarianMTModel")
    words = torch.randint(5, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(words)
    padding[1, 5:] = 0
    for length in (8, 6, 1, 12):
        logits = []
        for name in ("eager", "annulus"):
            model.set_attn_implementation(name)
            decoder = words[:, :1].expand(-1, length)
            logits.append(model(words, attention_mask=padding, decoder_input_ids=decoder).logits)
        assert torch.allclose(*logits, atol=1e-4), length
    assert isinstance(model, transformers.PreTrainedModel)


def test_tokens_of_images_attend_to_each_other() -> None:
    transformers = pytest.importorskip("transformers")
    annulus.torch.register()
    from tiny_transformers import build

    model, given = build("Gemma3ForConditionalGeneration")
    kinds = torch.zeros_like(given["input_ids"])
    kinds[:, 2:6] = 1
    logits = []
    for name in ("eager", "annulus"):
        model.set_attn_implementation(name)
        logits.append(model(**given, token_type_ids=kinds).logits)
    plain = model(**given).logits
    assert torch.allclose(*logits, atol=1e-4) and not torch.allclose(plain, logits[0], atol=1e-2)
    assert isinstance(model, transformers.PreTrainedModel)


def test_a_class_that_computes_its_attention_itself_is_warned_of_once() -> None:
    transformers = pytest.importorskip("transformers")
    annulus.torch.register()
    config = transformers.FalconConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    make = transformers.AutoModelForCausalLM.from_config
    with pytest.warns(UserWarning, match="FalconForCausalLM") as caught:
        model = make(config, attn_implementation="annulus").eval()
    assert len([one for one in caught if "FalconForCausalLM" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(config, attn_implementation="annulus")
    words = torch.arange(8)[None]
    eager = make(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    assert torch.equal(model(words).logits, eager(words).logits)


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_models_over_ranks(ranks: int) -> None:
    assert f"passed on {ranks} ranks" in launch(ranks, "models_program.py")


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_models_of_transformers_over_ranks(ranks: int) -> None:
    pytest.importorskip("transformers")
    assert f"passed on {ranks} ranks" in launch(ranks, "transformers_program.py", limit=900)


@needs_mpi
@pytest.mark.parametrize("example", ["packed_documents.py", "torch_training_step.py"])
def test_an_example_gives_the_same_on_every_number_of_ranks(example: str) -> None:
    said = [launch(ranks, f"../examples/{example}") for ranks in (1, 2)]
    losses = [[float(line.split()[-1]) for line in text.splitlines()] for text in said]
    assert len(losses[0]) == len(losses[1]) == 5 and losses[0][-1] < losses[0][0]
    assert all(abs(a - b) < 1e-4 for a, b in zip(*losses, strict=True)), said
