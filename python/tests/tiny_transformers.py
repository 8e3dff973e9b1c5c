"""Tiny models of transformers, from the default values of their configurations, and their inputs.

A configuration is made anew with smaller values, by the names of its fields. Where a class refuses
the result, the next attempt keeps more of the defaults.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
WORDS = 99
LENGTH = 12

# (pattern of a field's name, value); the first match counts
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|^n_vocab|num_embeddings$|^n_words$|group_vocab$", WORDS),
    (r"(max_position|max_seq|max_source|max_target|n_positions|n_ctx|context_length)", 128),
    (
        r"^(num_)?(key_value|kv)_heads$|num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group",
        2,
    ),
    (r"^n_head$|^n_heads$|attention_heads$|num_heads$|^num_head$|heads$", 4),
    (r"num_experts_per_tok|moe_topk|top_k$|num_experts_per_token|moe_k$|num_selected", 2),
    (r"^n_group$|^topk_group$|num_expert_group", 1),
    (r"num_shared_experts|n_shared_experts", 1),
    (r"experts$", 4),
    (r"(num_)?nextn_predict_layers|mtp", 0),
    (r"(num_.*layers$|^n_layers?$|_layers$|^depth$|num_.*blocks$|^layers$)", 2),
    (r"sliding_window$|attention_window|window_size$|local_attention$", 4),
    (r"attention_chunk_size", 5),
    (r"qk_head_dim", 16),
    (r"index_kpool", 2),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"v_head_dim|head_dim$|head_size$|d_kv|attention_head_dim|kv_channels|head_width", 8),
    (r"q_lora_rank|kv_lora_rank|lora_rank|o_lora_rank|lora_dim", 16),
    (r"rotary_dim", 4),
    (r"index_n_heads", 4),
    (r"index_topk", 4),
    (r"(intermediate|ffn|mlp_dim|d_ff|feed_?forward|d_inner|n_inner|mlp_hidden|ffw)", 48),
    (r"image_size|img_size|crop_size", 32),
    (r"^patch_size$", 8),
    (r"upsample_groups", 32),
    (
        r"(hidden_size|^d_model$|n_embd|^dim$|embed_dim|hidden_dim|embedding_size|embedding_dim|^width$"
        r"|projection_dim|out_hidden_size|d_embed|projector_dim|proj_dim|encoder_dim|decoder_dim)",
        32,
    ),
)
MODEST: tuple[tuple[str, ...], ...] = (
    ("vocab_size", "layers$|^n_layers?$|^depth$", "experts$", "max_position"),
    ("vocab_size", "experts$"),
)
"""Fields that a higher level makes small as well."""
MISSING = {
    "num_experts_per_tok": 2,
    "prediction_length": 4,
    "vocab_size": WORDS,
    "head_dim": 8,
    "attn_layer_indices": [1],
}
"""Values of fields that have no default."""
TWEAKS: dict[str, dict[str, Any]] = {
    "Blip2Config": {"image_token_index": 7},
    "CohereCompassTextConfig": {"layer_types": ["sliding_attention"] * 2},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 0, "n_output_layers": 1},
    "Dots1Config": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "NemotronConfig": {"num_key_value_heads": 2},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    },
    "Florence2VisionConfig": {
        "embed_dim": [8, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "num_groups": [2, 2, 2, 2],
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention", "sliding_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": WORDS,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1] * 4}
    },
    "InstructBlipConfig": {"image_token_index": 7},
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv"]},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "Sam2HieraDetConfig": {"hidden_size": 96},
    "Step3p7TextConfig": {"sliding_window": 4},
    "XmodConfig": {"default_language": "en_XX", "languages": ["en_XX"]},
}
"""Small values of fields that agree with others, or have no default."""
IDS = re.compile(r"(token_id|token_index|_idx|token_ids)$")


def names() -> list[str]:
    """Returns classes of every model type: one with a head that generates if there is one, and
    those of an encoder and a decoder.
    """
    of_kinds: dict[str, str] = {}
    for mapping in HEADS:
        for kind, name in getattr(auto, mapping).items():
            name = name[0] if isinstance(name, (list, tuple)) else name
            if name not in of_kinds.values():
                of_kinds.setdefault(kind, name)
    pairs = [*getattr(auto, HEADS[1]).values(), *getattr(auto, HEADS[3]).values()]
    return sorted({*of_kinds.values(), *(name for name in pairs if isinstance(name, str))})


def decoder_only() -> set[str]:
    """Returns the classes of causal language models."""
    return set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _smaller(name: str, value: Any, level: int) -> Any:
    """Returns a smaller value of a field, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if name == "pad_token_id":
            return 0
        if IDS.search(name):
            return None if value < WORDS - 20 else WORDS - 20 + value % 19
        for pattern, small in SIZES:
            if re.search(pattern, name):
                kept = level > 0 and not any(re.search(most, name) for most in MODEST[level - 1])
                if kept:
                    return None if value <= 1024 or level > 1 else 256
                return min(value, small)
        return None
    if isinstance(value, float) and re.search(
        "dropout|drop_path|drop_rate|layerdrop|_p?drop$", name
    ):
        return 0.0
    if value is None and level < 2:
        return MISSING.get(name)
    return None


def tiny_config(
    cls: type[PreTrainedConfig], level: int = 0, sections: Any = None, default: Any = None
) -> Any:
    """Returns a small configuration. A higher level keeps more of the default's values.

    ``sections`` are those of rotary embeddings that have axes of images.
    """
    default = cls() if default is None else default
    fields = {field.name for field in dataclasses.fields(cls)}
    known = dict(vars(default))
    old_layers = {
        value
        for name, value in known.items()
        if isinstance(value, int) and re.search("layers$|^n_layer|^depth$|blocks$", name)
    }
    given: dict[str, Any] = {}
    for name, value in known.items():
        if name not in fields or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            if type(value).__name__.startswith("Timm"):
                given[name] = backbone()
                if "use_timm_backbone" in known:
                    given["use_timm_backbone"] = False
            else:
                given[name] = tiny_config(type(value), level, sections, value)
            continue
        small = _smaller(name, value, level)
        if "key_value_heads" in name and value == known.get("num_attention_heads"):
            small = 4 if level == 0 else None
        if small is not None:
            given[name] = small
        elif (
            level < 2
            and isinstance(value, (list, tuple))
            and len(value) in old_layers
            and len(value) > 2
        ):
            given[name] = _some_layers(list(value))
    rope = known.get("rope_parameters")
    if sections is not None and isinstance(rope, dict) and "vocab_size" in known:
        given["rope_parameters"] = {**rope, "mrope_section": sections}
    if level < 2:
        given |= TWEAKS.get(cls.__name__, {})
    return cls(**given)


def backbone() -> Any:
    """Returns a small convolutional backbone, in place of one of timm."""
    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def _some_layers(values: list[Any]) -> list[Any]:
    """Returns two layers, of two kinds if there are two."""
    other = next((value for value in values if value != values[0]), values[1])
    return [values[0], other]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a model in evaluation mode, and inputs that it accepts.

    Its weights are such that attention is far from uniform.
    """
    cls = getattr(transformers, name)
    config_class = cls.config_class
    failures: list[str] = []
    for level, sections in ((0, None), (0, [2, 1, 1]), (0, [1, 1, 0]), (1, None), (2, None)):
        if sections is not None and not re.search("split|mrope", "".join(failures)):
            continue
        try:
            torch.manual_seed(0)
            config = tiny_config(config_class, level, sections)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            count = parameters_of(cls, config)
            if count > 40_000_000:
                failures.append(f"{count} parameters")
                continue
            model = cls._from_config(config, attn_implementation="eager")
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            continue
        spread(model)
        model = model.float().eval()
        for given in with_image_tokens(model, inputs(model), failures):
            try:
                with torch.no_grad():
                    outputs = model(**given)
                if any(
                    isinstance(one, torch.Tensor) and one.isnan().any() for one in outputs.values()
                ):
                    raise ValueError("outputs are not numbers")
                return model, given
            except Exception as error:
                failures.append(f"{list(given)}: {type(error).__name__}: {error}")
    raise RuntimeError(
        " | ".join(str(text).replace("\n", " ")[:260] for text in dict.fromkeys(failures))
    )


def with_image_tokens(
    model: Any, found: Iterator[dict[str, Any]], failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Yields inputs, and after a failure for want of tokens of images, the same with such tokens.

    ``failures`` are those of the inputs so far.
    """
    token = getattr(model.config, "image_token_id", None)
    for given in found:
        count = len(failures)
        yield given
        message = re.search(r"tokens: 0, features: (\d+)", "".join(failures[count:]))
        if message and token is not None and "input_ids" in given:
            ids = given["input_ids"]
            images = ids.new_full((2, int(message[1]) // 2), token)
            yield {**given, "input_ids": torch.cat([ids[:, :2], images, ids[:, 2:]], -1)}


def parameters_of(cls: Any, config: Any) -> int:
    """Returns the number of parameters of a model, or 0 if that is not known without memory."""
    try:
        with torch.device("meta"):
            model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def spread(model: Any) -> None:
    """Gives weights a spread by which scores of attention differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                fan_in = math.prod(parameter.shape[1:])
                scale = 1.0 if "embed" in name.lower() else 1.5 / math.sqrt(max(fan_in, 1))
                parameter.copy_(noise * min(scale, 1.0))
            else:
                parameter.add_(noise * 0.1)


def extras(config: Any, generator: Any) -> dict[str, Any]:
    """Returns inputs that few models require."""
    width = getattr(config, "hidden_size", 32)
    return {
        "query_embeds": torch.randn(2, 8, width, generator=generator),
        "qformer_input_ids": torch.randint(5, 50, (2, 6), generator=generator),
        "latents": torch.randn(2, LENGTH, width, generator=generator),
        "num_frames": 4,
        "past_time_features": torch.zeros(2, LENGTH - 1, getattr(config, "num_time_features", 0)),
        "past_observed_mask": torch.ones(2, LENGTH - 1),
        "past_values": torch.randn(2, LENGTH - 1, generator=generator).abs(),
        "past_values_padding": torch.zeros(2, LENGTH - 1, dtype=torch.long),
        "freq": torch.zeros(2, 1, dtype=torch.long),
        "merge_sizes": torch.tensor([2, 2]),
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.randn(2, LENGTH, width, generator=generator),
    }


def patch_widths(config: Any) -> list[int]:
    """Returns numbers of values of a patch, as models of images of any size may take them."""
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3) or 3
    patch = getattr(config, "patch_size", 8)
    times = getattr(config, "temporal_patch_size", 1)
    image = channels * patch * patch
    return [image * times, image, config.hidden_size, image * 2]


def sound_bins(config: Any) -> int:
    """Returns the number of values of a frame of sound."""
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", config)
    fields = "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "input_size"
    return next((getattr(audio, name) for name in fields if getattr(audio, name, None)), 80)


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yields inputs that a model may accept, the simplest first."""
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)
    config = model.config
    text = config.get_text_config()
    words = min(getattr(text, "vocab_size", WORDS) or WORDS, WORDS - 20)

    def ids(length: int = LENGTH) -> Any:
        return torch.randint(5, max(words, 6), (2, length), generator=generator)

    def image() -> Any:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 32
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3) or 3
        channels = channels if isinstance(channels, int) else 3
        return torch.randn(2, channels, *size, generator=generator)

    base: dict[str, Any] = {}
    if "input_ids" in parameters:
        base["input_ids"] = ids()
    if "decoder_input_ids" in parameters:
        base["decoder_input_ids"] = ids(LENGTH - 3)
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and name not in base
    }
    extra = {name: given for name, given in extras(config, generator).items() if name in required}
    if extra:
        base |= extra
    if required <= base.keys():
        yield dict(base)
    if "encoder_hidden_states" in parameters and "query_embeds" in base:
        width = config.encoder_hidden_size
        states = torch.randn(2, 6, width, generator=generator)
        yield {**base, "encoder_hidden_states": states}
    grids = [name for name in ("grid_thw", "image_grid_thw") if name in required]
    if grids:
        for width in patch_widths(config):
            patches = torch.randn(32, width, generator=generator)
            grid = {**extra, grids[0]: torch.tensor([[1, 4, 4], [1, 4, 4]])}
            yield {
                ("hidden_states" if "hidden_states" in parameters else "pixel_values"): patches,
                **grid,
            }
        channels, patch = getattr(config, "num_channels", 3), getattr(config, "patch_size", 8)
        patches = torch.randn(32, channels, patch, patch, generator=generator)
        yield {"pixel_values": patches, **grid}
        return
    if "spatial_shapes" in parameters:
        width = 3 * getattr(config, "vision_config", config).patch_size ** 2
        yield {
            **{name: one for name, one in base.items() if name == "input_ids"},
            "pixel_values": torch.randn(2, 16, width, generator=generator),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
        }
    if "flattened_patches" in parameters:
        width = config.vision_config.patch_embed_hidden_size
        patches = torch.randn(2, 16, 2 + width, generator=generator)
        patches[..., :2] = torch.arange(1, 33).view(1, 16, 2) % 8
        yield {**base, "flattened_patches": patches}
    if "bbox" in parameters:
        yield {**base, "bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long)}
    if "pixel_values" in parameters:
        yield {**base, "pixel_values": image()}
        yield {"pixel_values": image()}
        yield {**base, "pixel_values": image()[:, None].expand(-1, 4, -1, -1, -1)}
        yield {"pixel_values": image()[:, None].repeat(1, 2, 1, 1, 1)}
        frames = getattr(getattr(config, "vision_config", config), "num_frames", None)
        if isinstance(frames, int):
            yield {"pixel_values": image()[:, None].repeat(1, frames, 1, 1, 1)}
            yield {**base, "pixel_values": image()[:, None].repeat(1, frames, 1, 1, 1)}
        if "decoder_input_ids" in base:
            yield {"pixel_values": image(), "decoder_input_ids": base["decoder_input_ids"]}
        if "pixel_mask" in parameters or True:
            yield {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
            yield {**base, "pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
            yield {"pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
    if "pixel_values_videos" in parameters:
        for count in dict.fromkeys((4, 16, getattr(config, "num_frames", 4))):
            video = image()[:, None].repeat(1, count, 1, 1, 1)
            yield {"pixel_values_videos": video}
            yield {**base, "pixel_values_videos": video}
    decoder = {name: given for name, given in base.items() if name.startswith("decoder")}
    if "input_features" in parameters:
        frames = 2 * (getattr(config, "max_source_positions", 16) or 16)
        for bins in dict.fromkeys((sound_bins(config), 2 * sound_bins(config), 128)):
            for length in (frames, 3000, 200, 96, 64, 16):
                across = {"input_features": torch.randn(2, bins, length, generator=generator)}
                along = {"input_features": torch.randn(2, length, bins, generator=generator)}
                if "input_features_mask" in parameters:
                    mask = torch.ones(2, length, dtype=torch.long)
                    yield {**decoder, **across, "input_features_mask": mask}
                    yield {**decoder, **along, "input_features_mask": mask.bool()}
                yield {**decoder, **across}
                yield {**decoder, **along}
                yield {**base, **across}
    if "input_values" in parameters:
        for shape in ((2, 4000), (2, 1, 4000), (2, 1024, 128), (2, 64, 80)):
            yield {**decoder, "input_values": torch.randn(*shape, generator=generator)}
            yield {**base, "input_values": torch.randn(*shape, generator=generator)}
    if "inputs_embeds" in parameters:
        width = getattr(text, "hidden_size", 32)
        yield {"inputs_embeds": torch.randn(2, LENGTH, width, generator=generator)}
    if "hidden_states" in parameters:
        width = getattr(config, "hidden_size", 32)
        yield {"hidden_states": torch.randn(2, LENGTH, width, generator=generator)}
    if "past_values" in parameters:
        length = getattr(config, "context_length", 24)
        yield {"past_values": torch.randn(2, length, generator=generator)}
        channels = getattr(config, "num_input_channels", 1)
        yield {"past_values": torch.randn(2, length, channels, generator=generator)}
    if "input_points" in parameters:
        yield {"pixel_values": image(), "input_points": torch.rand(2, 1, 1, 2) * 20}
