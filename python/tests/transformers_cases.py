"""Comparisons of one class of transformers: attention by annulus with ``eager`` and ``sdpa``.

A case is equal if every output and gradient is that of one of the others. Rows of padding count
only where that fails, since ``eager`` and ``sdpa`` differ in rows without a visible key.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
from tiny_transformers import build
from transformers import AttentionInterface

import annulus_attention as annulus
import annulus_attention.torch

BOUND = 2e-3
"""Largest relative difference. Weights are float32, with scores of up to a few tens."""
PADDED = 4


def run(model: Any, given: dict[str, Any], *, gradients: bool = True) -> dict[str, Any]:
    """Returns floating point outputs by name, and gradients of parameters."""

    model.zero_grad()
    given = cast(model, given)
    torch.manual_seed(0)
    with torch.set_grad_enabled(gradients):
        results = {name: one for name, one in flat(model(**given)) if one.is_floating_point()}
        if not gradients:
            return results
        total = 0.0
        for name, one in results.items():
            if one.requires_grad and "past_key_values" not in name:
                finite = torch.where(torch.isfinite(one) & (one.abs() < 1e6), one, 0.0)
                total = total + (finite * weights(one)).sum()
        if isinstance(total, torch.Tensor):
            total.backward()
    results = {name: one.detach() for name, one in results.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results["gradient of " + name] = parameter.grad.detach().clone()
    return results


def cast(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns inputs in the type of a model's parameters."""
    return {
        name: one.to(model.dtype) if hasattr(one, "dtype") and one.is_floating_point() else one
        for name, one in given.items()
    }


def weights(tensor: Any) -> Any:
    """Returns weights of a loss: not constant along any axis."""

    return torch.linspace(-1, 1.7, tensor.numel()).cos().view(tensor.shape)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a model's output."""

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from flat(one, f"{name}.{index}")


def differences(got: dict[str, Any], want: dict[str, Any], tokens: Any = None) -> list[str]:
    """Returns the outputs and gradients that differ, the largest differences first.

    ``tokens`` has the rows of sequences that count.
    """
    found = []
    # a parameter of an expert without tokens has no gradient
    for one, other in ((got, want), (want, got)):
        missing = [name for name in other if name.startswith("gradient") and name not in one]
        one |= {name: other[name] * 0 for name in missing}
    if got.keys() != want.keys():
        found.append((9.0, f"outputs {sorted(got.keys() ^ want.keys())[:3]}"))
    for name in got.keys() & want.keys():
        one, other = got[name].double(), want[name].double()
        if one.shape != other.shape:
            found.append((9.0, f"{name}: shape {tuple(one.shape)}, want {tuple(other.shape)}"))
            continue
        if tokens is not None and one.ndim > 2:
            # a model may append a token of its own
            for rows in (tokens, torch.nn.functional.pad(tokens, (0, 1), value=True)):
                if one.shape[:2] == rows.shape:
                    one, other = one[rows], other[rows]
                    break
        if one.numel() == 0:
            continue
        if (one.isfinite() != other.isfinite()).any():
            found.append((9.0, f"{name}: not finite"))
            continue
        one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
        scale = max(other.abs().max().item() * 0.3, other.square().mean().sqrt().item(), 1e-6)
        if name.startswith("gradient"):
            # gradients that cancel are rounding
            largest = max(
                grad.abs().max().item()
                for key, grad in want.items()
                if key.startswith("gradient") and grad.numel()
            )
            scale = max(scale, 1e-3 * largest)
        off = (one - other).abs().max().item() / scale
        if off > BOUND:
            found.append((off, f"{name}: {off:.1e}"))
    return [text for _, text in sorted(found, reverse=True)]


class Sweep:
    """The comparisons of one class."""

    def __init__(self, name: str) -> None:

        self.name = name
        self.calls = 0
        self.rows: dict[str, str] = {}
        self.keywords: set[str] = set()
        annulus.torch.register()

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.keywords |= {key for key, value in options.items() if value is not None}
            return annulus.torch.attention_forward(*args, **options)

        counted.__module__ = "annulus.torch"
        AttentionInterface.register("annulus", counted)

    def case(self, label: str, work: Any, tokens: Any = None) -> None:
        """Compares the results of implementations, in float64 if they differ in float32."""
        singles = self.compare_once(label, work, tokens)
        if self.rows.get(label, "").startswith("differs"):
            before = self.rows.pop(label)
            self.model.double()
            try:
                doubles = self.compare_once(label, work, tokens)
            finally:
                self.model.float()
            self.rows.setdefault(label, before)
            # eager's mask overflows in rows without a visible key, in one of the types
            finite = [finite_outputs(wants) for wants in (singles, doubles)]
            if "not finite" in self.rows[label] and finite[0] != finite[1]:
                self.rows[label] = "references differ: finite in one type"

    def compare_once(self, label: str, work: Any, tokens: Any) -> list[dict[str, Any]]:
        """Compares the results of implementations, and returns those of the references."""

        results: dict[str, Any] = {}
        for implementation in ("eager", "sdpa", "annulus"):
            try:
                self.model.set_attn_implementation(implementation)
                results[implementation] = work()
            except Exception as error:
                results[implementation] = error
        wants = [
            results[name] for name in ("sdpa", "eager") if not isinstance(results[name], Exception)
        ]
        if not wants:
            return wants
        got = results["annulus"]
        if isinstance(got, annulus.Error) and got.argument:
            self.rows[label] = f"refused: {got.argument} | {str(got)[:160]}"
        elif isinstance(got, Exception):
            place = traceback_of(got)
            self.rows[label] = f"crash: {type(got).__name__}: {str(got)[:200]} at {place}"
        else:
            found = [differences(got, want) for want in wants]
            if all(found) and tokens is not None:
                found = [differences(got, want, tokens) for want in wants]
            if not all(found):
                self.rows[label] = "equal"
            elif len(wants) == 2 and differences(wants[0], wants[1], tokens):
                self.rows[label] = f"references differ: {found[0][:2]}"
            else:
                self.rows[label] = f"differs: {found[0][:3]}"
        return wants

    def compare(self) -> str:
        """Compares everything, and returns the kind of the class."""

        self.model, given = build(self.name)
        model = self.model
        accepted = inspect.signature(model.forward).parameters
        self.case("plain", lambda: run(model, given))
        self.case("train", lambda: self.trained(given))
        texts = [name for name in ("input_ids", "decoder_input_ids") if name in given]
        for name in texts:
            mask_name = {"input_ids": "attention_mask"}.get(name, "decoder_attention_mask")
            if mask_name not in accepted:
                continue
            for side in ("right", "left"):
                mask = torch.ones_like(given[name])
                mask[1, slice(0, PADDED) if side == "left" else slice(-PADDED, None)] = 0
                padded = {**given, mask_name: mask}
                # gradients count where padded rows reach no loss
                self.case(
                    f"{mask_name} {side}",
                    lambda padded=padded: run(model, padded, gradients=False),
                    mask.bool(),
                )
                self.case(
                    f"{mask_name} {side}, gradients",
                    lambda padded=padded, mask=mask: token_gradients(model, padded, mask),
                )
        ids = given.get("input_ids")
        if ids is not None and "position_ids" in accepted and "decoder_input_ids" not in given:
            length = ids.shape[1]
            packed = torch.cat([torch.arange(5), torch.arange(length - 5)])[None].expand(2, -1)
            self.case("packed", lambda: run(model, {**given, "position_ids": packed}))
        if getattr(model, "can_generate", lambda: False)() and texts:
            self.case("generate", lambda: self.generated(given, left=False))
            if set(given) <= {"input_ids", "decoder_input_ids"}:
                self.case("generate, padded", lambda: self.generated(given, left=True))
                self.case("static cache", lambda: self.generated(given, static=True))
        kinds = {text.partition(":")[0] for text in self.rows.values()}
        for kind in ("crash", "differs", "refused"):
            if kind in kinds:
                return kind
        return "equal" if self.calls else "eager only"

    def trained(self, given: dict[str, Any]) -> Any:
        self.model.train()
        try:
            return run(self.model, given)
        finally:
            self.model.eval()

    def generated(
        self, given: dict[str, Any], left: bool = False, static: bool = False
    ) -> dict[str, Any]:

        given = cast(self.model, given)
        given.pop("decoder_input_ids", None)
        if left:
            mask = torch.ones_like(given["input_ids"])
            mask[1, :PADDED] = 0
            given["attention_mask"] = mask
        config = self.model.generation_config
        config.eos_token_id = config.forced_eos_token_id = None
        if config.pad_token_id is None:
            config.pad_token_id = 0
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        with torch.no_grad():
            result = self.model.generate(
                **given,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                output_logits=True,
                return_dict_in_generate=True,
                disable_compile=True,
                **options,
            )
        return {f"logits {index}": one for index, one in enumerate(result.logits)}


def finite_outputs(results: list[dict[str, Any]]) -> list[dict[str, bool]]:
    """Returns which outputs of each reference are finite."""
    return [{name: bool(one.isfinite().all()) for name, one in of.items()} for of in results]


def token_gradients(model: Any, given: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Returns gradients of a loss of the tokens."""

    model.zero_grad()
    given = cast(model, given)
    total: Any = 0.0
    for name, one in flat(model(**given)):
        if one.is_floating_point() and one.requires_grad and "past_key" not in name:
            if one.shape[:2] == mask.shape and one.ndim > 2:
                one = one[mask.bool()]
                finite = torch.where(torch.isfinite(one) & (one.abs() < 1e6), one, 0.0)
                total = total + (finite * weights(one)).sum()
    if not isinstance(total, torch.Tensor):
        return {}
    total.backward()
    return {
        "gradient of " + name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def traceback_of(error: BaseException) -> str:
    """Returns the innermost lines of an error's traceback."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        places.append(f"{os.path.basename(frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(places[-3:])
