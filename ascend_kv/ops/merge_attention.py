"""``merge_attention``: parts of one attention, over disjoint keys → the whole of it.

What ``paged_attention`` returns for each part is enough, however the parts' keys are stored
(formats, compressed or not, a shared prefix)::

    log_sum_exp = log(sum_i exp(log_sum_exp_i) + exp(sink))
    output      = sum_i exp(log_sum_exp_i - log_sum_exp) output_i

after Ye et al., Cascade Inference (FlashInfer), 2024, and Dao et al., Flash-Decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "merge_attention(Tensor[] outputs, Tensor[] log_sum_exps, *, Tensor? sinks=None) "
    "-> (Tensor output, Tensor log_sum_exp)"
)


def merge_attention(
    outputs: Sequence[Tensor], log_sum_exps: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge one or more parts of one attention.

    A sink counts once in the whole: give it here and to no part, or to exactly one part and not
    here. Where it went to a part, that part's log-sum-exp holds it and nothing is left to do. A
    sink that two parts have counted cannot be taken out again without losing the digits that
    matter, and cannot be seen in their numbers: it is the caller's mistake.

    Args:
        outputs: of each part ``[T, H, D]``, float32, float16 or bfloat16, all of one type.
        log_sum_exps: of each part ``[T, H]`` float32, natural logarithm.
        sinks: ``[H]``, a logit for each head in the denominator only, which no part has counted.

    Returns:
        output: ``[T, H, D]`` in the parts' type, computed in float32.
        log_sum_exp: ``[T, H]`` float32, the sink counted.

    Raises:
        UsageError: no part, or shapes or types that disagree.

    A part whose log-sum-exp is -inf saw nothing: its output is ignored, whatever it is. Where no
    part saw anything the output is 0 and the log-sum-exp -inf (the sink where there is one). NaN
    in a log-sum-exp, or infinity, makes its query and head NaN.
    """
    if not outputs:
        raise UsageError("outputs", "no parts", "one or more")
    if len(log_sum_exps) != len(outputs):
        raise UsageError("log_sum_exps", f"{len(log_sum_exps)} parts", f"{len(outputs)}")
    first = outputs[0]
    if first.dim() != 3:
        raise UsageError("outputs[0]", tuple(first.shape), "[tokens, heads, head_dim]")
    if first.dtype not in FLOAT_DTYPES:
        raise UsageError("outputs[0]", first.dtype, FLOAT_DTYPES)
    for i, (output, log_sum_exp) in enumerate(zip(outputs, log_sum_exps)):
        _check(f"outputs[{i}]", output, first.shape, first.dtype)
        _check(f"log_sum_exps[{i}]", log_sum_exp, first.shape[:2], torch.float32)
    if sinks is not None and sinks.shape != first.shape[1:2]:
        raise UsageError("sinks", tuple(sinks.shape), f"[{first.shape[1]}], one a query head")
    output, log_sum_exp = _op(outputs, log_sum_exps, sinks=sinks)
    return output, log_sum_exp


def _check(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise UsageError(name, tuple(tensor.shape), f"{tuple(shape)}")
    if tensor.dtype is not dtype:
        raise UsageError(name, tensor.dtype, f"{dtype}")


def _reference(
    outputs: Sequence[Tensor], log_sum_exps: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    parts = list(log_sum_exps)
    if sinks is not None:
        parts.append(sinks.to(torch.float32).expand_as(parts[0]))
    sums = torch.stack(parts)
    # softmax and not exp(part - whole): the weights add up to 1 however the whole is rounded
    weights = torch.softmax(sums, 0).masked_fill_(sums == -torch.inf, 0.0)
    merged = torch.zeros(outputs[0].shape, dtype=torch.float32, device=sums.device)
    for part, output in enumerate(outputs):
        weight = weights[part][..., None]
        seen = output.to(torch.float32).masked_fill((sums[part] == -torch.inf)[..., None], 0.0)
        merged.addcmul_(seen, weight)
    return merged.to(outputs[0].dtype), torch.logsumexp(sums, 0)


def _fake(
    outputs: Sequence[Tensor], log_sum_exps: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    output = torch.empty(outputs[0].shape, dtype=outputs[0].dtype, device=outputs[0].device)
    return output, output.new_empty(output.shape[:2], dtype=torch.float32)


_op = register(SCHEMA, _reference, _fake)
