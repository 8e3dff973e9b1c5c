"""Compares attention implementations over the model classes of transformers; see
scripts/transformers-sweep.

Each class is built tiny from its own configuration. Its outputs and gradients with
``attn_implementation="annulus"`` are compared with those of ``eager`` and ``sdpa``. A worker
process compares one class after another; the program ends a worker that takes too long for a class,
and starts the next one after that class.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import inspect
import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

BOUND = 2e-3
"""Largest relative difference. Weights are float32, with scores of up to a few tens."""
SECONDS = 90
PADDED = 4
KINDS = ("equal", "refused", "differs", "crash", "eager only", "not built")


def run(model: Any, given: dict[str, Any], *, gradients: bool = True) -> dict[str, Any]:
    """Returns floating point outputs by name, and gradients of parameters."""
    import torch

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
    import torch

    return torch.linspace(-1, 1.7, tensor.numel()).cos().view(tensor.shape)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a model's output."""
    import torch

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
        if tokens is not None and one.shape[:2] == tokens.shape and one.ndim > 2:
            one, other = one[tokens], other[tokens]
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
                grad.abs().max().item() for key, grad in want.items() if key.startswith("gradient")
            )
            scale = max(scale, 1e-3 * largest)
        off = (one - other).abs().max().item() / scale
        if off > BOUND:
            found.append((off, f"{name}: {off:.1e}"))
    return [text for _, text in sorted(found, reverse=True)]


class Sweep:
    """The comparisons of one class."""

    def __init__(self, name: str) -> None:
        import annulus.torch

        self.name = name
        self.calls = 0
        self.rows: dict[str, str] = {}
        self.keywords: set[str] = set()
        annulus.torch.register()
        from transformers import AttentionInterface

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.keywords |= {key for key, value in options.items() if value is not None}
            return annulus.torch.attention_forward(*args, **options)

        counted.__module__ = "annulus.torch"
        AttentionInterface.register("annulus", counted)

    def case(self, label: str, work: Any, tokens: Any = None) -> None:
        """Compares the results of implementations, in float64 if they differ in float32."""
        self.compare_once(label, work, tokens)
        if self.rows.get(label, "").startswith("differs"):
            before = self.rows.pop(label)
            self.model.double()
            try:
                self.compare_once(label, work, tokens)
            finally:
                self.model.float()
            self.rows.setdefault(label, before)

    def compare_once(self, label: str, work: Any, tokens: Any) -> None:
        import annulus

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
            return
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

    def compare(self) -> str:
        """Compares everything, and returns the kind of the class."""
        import torch
        from tiny_transformers import build

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
        import torch

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


def token_gradients(model: Any, given: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Returns gradients of a loss of the tokens."""
    import torch

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


def work() -> None:
    """Compares the classes that are named on stdin, one line of JSON for each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        sweep = Sweep(name)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                kind = sweep.compare()
            except Exception as error:
                kind = "not built"
                sweep.rows = {"": f"{type(error).__name__}: {str(error)[:1500]}"}
        answer = {
            "name": name,
            "kind": kind,
            "rows": sweep.rows,
            "keywords": sorted(sweep.keywords),
        }
        print(json.dumps(answer), flush=True)


class Worker:
    """A process that compares classes, and lines that it has written."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        # the imports of a worker are not the time of a class
        assert self.lines.get(timeout=600) == "ready\n", "a worker ended as it began"

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def compare(self, name: str, seconds: float) -> dict[str, Any] | None:
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            line = ""
        if line:
            return json.loads(line)
        self.process.kill()
        return None


def table(known: dict[str, Any]) -> str:
    """Returns the page of all results."""
    import torch
    import transformers
    from tiny_transformers import decoder_only

    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted(known):
        kinds[known[name]["kind"]].append(name)
    calling = [*kinds["equal"], *kinds["refused"], *kinds["differs"], *kinds["crash"]]
    decoders = [name for name in calling if name in decoder_only()]
    equal = set(kinds["equal"])
    lines = [
        "# Model classes of transformers",
        "",
        "`scripts/transformers-sweep` wrote this page, with transformers"
        f" {transformers.__version__} and torch {torch.__version__}.",
        "It builds one class of each model type tiny from its own configuration, and compares",
        '`attn_implementation="annulus"` with `eager` and `sdpa`: outputs, gradients, padding on',
        "either side, packed positions, `generate` with a growing and with a static cache.",
        "",
        "| result | classes | causal language models |",
        "|---|---:|---:|",
    ]
    names = {
        "equal": "equal",
        "refused": "a case is refused, by the name of an argument",
        "differs": "a case differs silently",
        "crash": "another error",
        "eager only": "never calls the attention interface",
        "not built": "not built from its default configuration, or without inputs",
    }
    for kind, text in names.items():
        few = len([name for name in kinds[kind] if name in decoder_only()])
        lines.append(f"| {text} | {len(kinds[kind])} | {few} |")
    lines += [
        "",
        f"Of {len(calling)} classes that call the attention interface {len(equal)} are equal; of"
        f" {len(decoders)}",
        f"causal language models among them {len(equal & set(decoders))}.",
    ]
    for kind in ("refused", "differs", "crash"):
        lines += ["", f"## {names[kind].capitalize()}", ""]
        for name in kinds[kind]:
            rows = known[name]["rows"]
            bad = {case: text for case, text in rows.items() if text.startswith(kind)}
            what = sorted(
                {text.split("|")[0].removeprefix(kind + ":").strip() for text in bad.values()}
            )
            cases = "all cases" if len(bad) == len(rows) else ", ".join(bad)
            lines += textwrap.wrap(
                f"* {name}: {'; '.join(what)} ({cases})", 100, subsequent_indent="  "
            )
        if not kinds[kind]:
            lines.append("None.")
    for kind in ("equal", "eager only", "not built"):
        lines += ["", f"## {names[kind].capitalize()}", ""]
        lines += textwrap.wrap(", ".join(kinds[kind]) + ".", 100)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="file of results, one class a line")
    parser.add_argument("--again", nargs="*", help="kinds of --json that are compared again")
    parser.add_argument("--table", help="file of the table")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth class")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each class")
    given = parser.parse_args()
    if given.work:
        work()
        return
    from tiny_transformers import names

    classes = given.classes or names()
    index, count = map(int, given.part.split("/"))
    classes = classes[index::count]
    known: dict[str, Any] = {}
    if given.json and os.path.exists(given.json):
        with open(given.json) as file:
            known = {one["name"]: one for one in map(json.loads, file)}
        if given.again is not None:
            known = {k: v for k, v in known.items() if v["kind"] not in given.again}
        elif not given.classes:
            known = {}
    worker = Worker()
    for name in classes:
        if name in known and not given.classes:
            continue
        answer = worker.compare(name, given.seconds)
        if answer is None:
            answer = {"name": name, "kind": "not built", "rows": {"": "no answer"}, "keywords": []}
            worker = Worker()
        known[name] = answer
        bad = [f"{k} → {v}" for k, v in answer["rows"].items() if v != "equal"]
        print(answer["kind"].ljust(10), name, *bad[:6], sep="  ", flush=True)
        if given.json:
            with open(given.json, "w") as file:
                file.writelines(json.dumps(one) + "\n" for one in known.values())
    worker.process.stdin.close()
    print(collections.Counter(one["kind"] for one in known.values()))
    if given.table:
        with open(given.table, "w") as file:
            file.write(table(known))


if __name__ == "__main__":
    main()
