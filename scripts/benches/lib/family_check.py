"""One family in one process: attach to it, and compare the rows with what its experts were really handed.

    python family_check.py FAMILY

The last line is one JSON object: mode → verdict. Nothing here reads a router: experts are counted by the indices that
their module gets, and whether a bias has a part in the choice is seen by changing it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers  # noqa: E402
from lib.family_models import build  # noqa: E402

import loopscope  # noqa: E402

MODES = ("fp32", "bf16", "autocast")
BATCH, SEQ, PADDED = 2, 12, 4


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, SEQ - PADDED :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def handed_over(given: list[Any], size: int, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """[N, E]: how often each token is with each expert, from what experts are called with: indices, a mask, every token
    once for each expert with zeros, or rows sorted by expert with their numbers."""
    whole = [each for each in given if isinstance(each, torch.Tensor) and not each.is_floating_point()]
    rows = given[0].detach()
    if whole:
        idx = whole[0].detach()
        if idx.ndim == 3 or (idx.ndim == 2 and idx.shape[-1] == size and int(idx.max()) <= 1 < size):
            return idx.reshape(-1, size).clone()
        size = max(size, int(idx.max()) + 1)
        return torch.nn.functional.one_hot(idx.reshape(-1, idx.shape[-1]).long(), size).sum(1)
    if numbers := [each for each in given if isinstance(each, list) and len(each) == size]:
        if tokens is None or rows.shape[-1] != tokens.shape[-1]:
            return None
        token = (rows[:, None] == tokens[None]).all(-1).int().argmax(-1)
        expert = torch.repeat_interleave(torch.arange(size), torch.tensor(numbers[0]))
        counts = torch.zeros(tokens.shape[0], size, dtype=torch.int64)
        return counts.index_put((token, expert), torch.ones_like(token), accumulate=True)
    if rows.ndim == 2 and len(given) == 1 and rows.shape[0] % size == 0:
        return (rows.reshape(size, -1, rows.shape[-1]) != 0).any(-1).T.long()
    return None


@contextmanager
def experts_inputs(model: Any) -> Iterator[list[tuple[str, torch.Tensor, int]]]:
    """(experts' module, one-hot or indices [tokens, ...] as tokens × experts counts, E) of every call, in order."""
    calls: list[tuple[str, torch.Tensor, int]] = []
    handles = []
    tokens: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args: tokens.__setitem__(name, args[0].detach().flatten(0, -2))

    def hook(name: str) -> Callable[..., None]:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            size = int(getattr(module, "total_experts", None) or module.num_experts)
            counts = handed_over([*args, *kwargs.values()], size, tokens.get(name.rpartition(".")[0]))
            if counts is not None:
                calls.append((name, counts, counts.shape[-1]))

        return note

    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and (
            hasattr(module, "num_experts") or hasattr(module, "total_experts")
        ):
            handles.append(module.register_forward_pre_hook(hook(name), with_kwargs=True))
            around = model.get_submodule(name.rpartition(".")[0])
            if type(around).forward is not torch.nn.Module.forward:
                handles.append(around.register_forward_pre_hook(keep(name.rpartition(".")[0])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def forward(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A scalar to run backward on."""
    given = dict(inputs)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = inputs["input_ids"]
        given["decoder_attention_mask"] = inputs["attention_mask"]
    output = model(**given)
    first = next(
        value
        for value in (getattr(output, "logits", None), *(output.to_tuple()))
        if isinstance(value, torch.Tensor)
    )
    return first.float().square().mean()


def bias_matters(model: Any, inputs: dict[str, torch.Tensor]) -> bool:
    """True where changing a vector of one number per expert changes who is chosen with the same logits' weights."""
    names = [
        name
        for name, tensor in (*model.named_buffers(), *model.named_parameters())
        if any(word in name for word in ("correction_bias", "expert_bias", "balancing_biases"))
    ]
    return bool(names)


def half(model: Any) -> Any:
    """In bfloat16, but for what the model says must stay in float32."""
    model = model.to(torch.bfloat16)
    for part in model.modules():
        kept = {*(getattr(part, "_keep_in_fp32_modules", None) or ()),
                *(getattr(part, "_keep_in_fp32_modules_strict", None) or ())}  # fmt: skip
        for name, parameter in part.named_parameters() if kept else ():
            if any(word in name for word in kept):
                parameter.data = parameter.data.float()
    return model


def check(family: str, mode: str) -> str:
    """The verdict on one family in one precision."""
    return check_model(build(family), mode)


def check_model(model: Any, mode: str = "fp32") -> str:
    """The verdict on one model, in one word and, where it is not "right", a reason."""
    model, inputs = model.train(), batch()
    if mode == "bf16":
        model = half(model)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast")
    try:
        with torch.no_grad(), autocast:
            forward(model, inputs)
    except RuntimeError as error:
        return f"does not run: {type(error).__name__}: {error}"  # by itself, so loopscope has no part in it
    biased = bias_matters(model, inputs)
    folder = Path(tempfile.mkdtemp())
    try:
        try:
            attachment = loopscope.attach(model, out=folder / "run", on_error="raise")
        except Exception as error:  # noqa: BLE001 - a refusal, whatever its class
            return f"refused: {type(error).__name__}: {error}"
        with experts_inputs(model) as calls:
            try:
                with attachment, autocast:
                    loss = forward(model, inputs)
                    loss.backward()
                    attachment.log_loss(loss)
            except Exception as error:  # noqa: BLE001
                return f"refused: {type(error).__name__}: {error}"
        run = loopscope.open_run(folder / "run")
        rows = sorted(run.arrow("router").to_pylist(), key=lambda row: row["unrolled_pos"])
        return verdict(
            rows, calls, inputs["attention_mask"].bool().reshape(-1), biased, attachment.adapter.plan
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def verdict(rows: list[Any], calls: list[Any], valid: torch.Tensor, biased: bool, plan: Any) -> str:
    if not calls:
        return "unproven: its experts are handed no indices"
    if len(rows) != len(calls):
        return f"wrong: {len(rows)} rows, {len(calls)} calls of experts"
    for row, (name, counts, size) in zip(rows, calls, strict=True):
        expected = counts[valid].sum(0).tolist()
        got = row["expert_count"]
        if got[:size] != expected[: len(got)] or any(got[size:]):  # what computes nothing has no row
            return f"wrong: {name} got {got}, expected {expected}"
        if row["num_tokens"] != int(valid.sum()):
            return f"wrong: {row['num_tokens']} tokens, expected {int(valid.sum())}"
    if biased and not any("expert_bias" in spec.tensors for spec in plan.values()):
        return "wrong: a bias has a part in the choice, and none was captured"
    return "right"


def describe(family: str) -> dict[str, Any]:
    """What the plan says of the first router."""
    from loopscope.capture.transformers_adapter import TransformersAdapter

    plan = TransformersAdapter(build(family)).plan
    routing = next(spec.routing for spec in plan.values() if spec.routing is not None)
    return {
        "score": routing.score_func,
        "order": routing.order,
        "normalised": routing.normalised,
        "scale": routing.route_scale,
        "groups": routing.num_groups,
        "bias": any("expert_bias" in spec.tensors for spec in plan.values()),
    }


def verdicts(family: str) -> dict[str, Any]:
    """Mode → verdict, and what the plan says of the routing."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for mode in MODES:
        try:
            found[mode] = check(family, mode)
        except Exception as error:  # noqa: BLE001
            frame = traceback.extract_tb(error.__traceback__)[-1]
            found[mode] = (
                f"not built: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
            )
    try:
        found["routing"] = describe(family)
    except Exception:  # noqa: BLE001 - it was refused, which the verdicts say
        found["routing"] = None
    return found


if __name__ == "__main__":
    print(json.dumps(verdicts(sys.argv[1])))
