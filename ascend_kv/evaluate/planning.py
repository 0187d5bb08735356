"""``ascend-kv plan``: what fits, how many at once and how fast, by policy; loads no torch.

Only ``--calibrate`` does, which runs the engine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ascend_kv.config import CacheConfig, SchedulerConfig, resolve_formats
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.plan_arguments import settle, whole_numbers
from ascend_kv.geometry import FORMATS
from ascend_kv.plan.calibration import Calibration, read_calibration
from ascend_kv.plan.capacity import describe_formats
from ascend_kv.plan.deployment import (
    ClockMaker,
    Deployment,
    Policy,
    plan_policy,
    roofline_clocks,
)
from ascend_kv.plan.hardware import get_hardware
from ascend_kv.plan.memory import Serving
from ascend_kv.plan.models import PlannedModel, find_planned_model, planned_weights
from ascend_kv.plan.parallel import Parallel, choose_parallel, choose_sparse_parallel
from ascend_kv.plan.published import stacks
from ascend_kv.plan.published_v4 import sparse_stacks
from ascend_kv.plan.sparse_deployment import SparsePolicy, plan_sparse_policy
from ascend_kv.plan.traces import Arrival, lengths_of, poisson_trace, read_trace
from ascend_kv.user_values import parse_bytes

DEFAULT_MAX_MODEL_LEN = 8192
_FLAGS = {
    "kv_cache_dtype": "--formats",
    "kv_cache_memory_bytes": "--memory",
    "kv_cache_dtype_skip_layers": "--skip-layers",
    "granularity": "--granularity",
    "scale_type": "--scale-type",
    "group_size": "--group-size",
    "indexer_cache_dtype": "--indexer-format",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "prompt": "--prompt",
    "device": "--device",
}
"""What the command line calls the fields that an error may name."""


class Plan(NamedTuple):
    """Everything the command found, ready to be shown.

    Attributes:
        deployment: what was planned.
        policies: one for each format, all of the kind that the model has.
        arrivals: the requests, drawn or read.
        calibration: of this machine, where there is one.
    """

    deployment: Deployment
    policies: Sequence[Policy] | Sequence[SparsePolicy]
    arrivals: list[Arrival]
    calibration: Calibration | None

    @property
    def fullest(self) -> Policy | SparsePolicy:
        """The policy whose parts beside the cache take most: theirs are shown for all."""

        def size(policy: Policy | SparsePolicy) -> tuple[int, int]:
            parts = policy.budget.parts
            return sum(part.high for part in parts), sum(part.bytes for part in parts)

        return max(self.policies, key=size)

    @property
    def stacks(self) -> Mapping[str, str]:
        """ "low", "best" and "high": what is fitted to for such a model."""
        sparse = self.deployment.model.geometry.compressed is not None
        found = sparse_stacks(self.deployment.weights) if sparse else stacks()
        return {name: source for name, (_, source) in found.items()}

    def why_no_speed(self, policy: Policy | SparsePolicy) -> str:
        """In words, of a policy without clocks."""
        name = self.deployment.hardware.name
        if isinstance(policy, SparsePolicy):
            if name == "cpu":
                return "only cards with a published bandwidth are predicted for such a model"
        elif self.deployment.by_references(policy.formats):
            return f"{policy.name} has no kernel on a {name}: it is served by references"
        if name == "cpu":
            return "add --calibrate, which measures this machine"
        return f"no bandwidth is published for the {name}"

    def why_copied(self, policy: Policy | SparsePolicy) -> str | None:
        """In words, why an NPU copies the cache in every step; None where it need not."""
        if isinstance(policy, SparsePolicy):
            return None
        copied = self.deployment.copied(policy.formats, policy.block_size)
        return next(iter(copied.values()), None)

    def need_speed(self, flag: str) -> None:
        """Refuse a flag that wants to know how long steps take.

        Raises:
            UsageError: of a policy nothing says it.
        """
        for policy in self.policies:
            if not policy.clocks:
                legal = "with --device 910B1 to 910B3, 950PR or 950DT, or with --calibrate"
                hint = f"No speed is predicted: {self.why_no_speed(policy)}."
                raise UsageError(flag, self.deployment.hardware.name, legal, hint)


def make_plan(options: argparse.Namespace) -> Plan:
    """Plan what the flags ask for.

    Args:
        options: from ``plan_arguments.add_arguments``.

    Raises:
        UsageError: names the flag of a value that is not legal, or what does not fit.
    """
    settle(options)
    kv_bytes = parse_bytes(options.memory, "--memory") if options.memory else None
    model = find_planned_model(options.model)
    serving = _serving(options, model)
    arrivals = _arrivals(options, serving.max_model_len)
    with named_as_flags():
        device, hardware = get_hardware(options.device)
    deployment = Deployment(
        model=model,
        weights=planned_weights(options.weights, model, device),
        parallel=_parallel(options, model),
        device=device,
        hardware=hardware,
        serving=serving,
        lengths=lengths_of(arrivals),
        kv_bytes=kv_bytes,
    )
    caches = _caches(options, model)
    calibration = _calibration(options, deployment, caches)
    if model.geometry.compressed is not None:
        costs = {name: each for name, (each, _) in sparse_stacks(deployment.weights).items()}
        with named_as_flags():
            sparse = [plan_sparse_policy(deployment, cache, costs) for cache in caches]
        return Plan(deployment, sparse, arrivals, None)
    maker = _calibrated_clocks(calibration) if calibration else roofline_clocks(
        {name: costs for name, (costs, _) in stacks().items()}
    )  # fmt: skip
    policies = []
    for cache in caches:
        with named_as_flags():
            policies.append(plan_policy(deployment, cache, maker))
    return Plan(deployment, policies, arrivals, calibration)


def _parallel(options: argparse.Namespace, model: PlannedModel) -> Parallel:
    cards, tensor, data = options.cards, options.tensor_parallel, options.data_parallel
    expert = options.expert_parallel
    if model.geometry.compressed is None:
        if expert is not None:
            legal = "with DeepSeek-V3.2 and V4 only"
            hint = "Other models' experts are cut over the cards of a copy, as all matrices."
            raise UsageError("--expert-parallel", expert, legal, hint)
        return choose_parallel(model.geometry, cards, tensor, data)
    heads = [model.geometry.num_heads, *(n for n in (model.config.get("o_groups"),) if n)]
    experts = model.parameters.num_experts
    return choose_sparse_parallel(heads, experts, (cards, tensor, data, expert))


def _serving(options: argparse.Namespace, model: PlannedModel) -> Serving:
    longest = model.geometry.max_position_tokens
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = min(DEFAULT_MAX_MODEL_LEN, longest)
    if not 2 <= max_model_len <= longest:
        raise UsageError("--max-model-len", max_model_len, f"2 to {longest} in this model")
    if not 0 < options.memory_utilization <= 1:
        raise UsageError("--memory-utilization", options.memory_utilization, "above 0, at most 1")
    with named_as_flags():
        limits = SchedulerConfig(
            max_model_len, options.max_num_seqs, options.max_num_batched_tokens
        )
    return Serving(
        max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        options.memory_utilization,
    )


def _arrivals(options: argparse.Namespace, max_model_len: int) -> list[Arrival]:
    if options.trace is not None:
        return read_trace(options.trace, max_model_len)
    prompt, output = options.prompt, options.output
    for flag, given in (("--prompt", prompt), ("--output", output)):
        if given < 1:
            raise UsageError(flag, given, "1 or more")
    if prompt + output > max_model_len:
        legal = f"at most --max-model-len = {max_model_len} together"
        raise UsageError("--prompt and --output", f"{prompt} + {output}", legal)
    rate = _rate(options.simulate)
    return poisson_trace(
        options.requests, rate, prompt, output, options.sigma, max_model_len, options.seed
    )


def _rate(given: str | None) -> float:
    try:
        rate = math.inf if given is None else float(given)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise UsageError("--simulate", given, "requests a second, above 0, or inf")
    return rate


def _caches(options: argparse.Namespace, model: PlannedModel) -> list[CacheConfig]:
    """A policy for each format; what is about scales in quantized ones only."""
    sparse = model.geometry.compressed is not None
    if options.indexer_format is not None and not sparse:
        legal = "with DeepSeek-V3.2 and V4 only"
        raise UsageError("--indexer-format", options.indexer_format, legal)
    names = options.formats
    if names is None:
        names = "auto,int8" if sparse else "float16,int8"
    skipped = whole_numbers(
        options.skip_layers, "--skip-layers", "layer numbers with commas, such as 0,1"
    )
    caches = []
    for name in (name.strip() for name in names.split(",")):
        try:
            with named_as_flags():
                caches.append(
                    CacheConfig(
                        kv_cache_dtype=name,
                        granularity=options.granularity,
                        symmetric=not options.asymmetric,
                        scale_type=options.scale_type,
                        group_size=options.group_size,
                        indexer_cache_dtype=options.indexer_format or "auto",
                        kv_cache_dtype_skip_layers=() if name in ("auto", *FORMATS) else skipped,
                        block_size=options.block_size,
                    )
                )
        except UsageError as error:
            if error.field != "symmetric":
                raise
            hint = "For one format of several, write it there: --formats fp8,int8/asymmetric."
            legal = "formats that have zero points, int8 and int4"
            raise UsageError("--asymmetric", name, legal, hint) from None
    return caches


def _calibration(
    options: argparse.Namespace, deployment: Deployment, caches: Sequence[CacheConfig]
) -> Calibration | None:
    if options.save_calibration is not None and not options.calibrate:
        given = str(options.save_calibration)
        raise UsageError("--save-calibration", given, "together with --calibrate")
    if not options.calibrate and options.calibration is None:
        return None
    flag = "--calibrate" if options.calibrate else "--calibration"
    if deployment.model.geometry.compressed is not None:
        legal = "a model that keeps every token"
        raise UsageError(flag, deployment.model.name, legal, "Other steps are not measured.")
    if deployment.hardware.name != "cpu":
        raise UsageError(flag, options.device, "with --device cpu", "This machine is measured.")
    model, weights = deployment.model, deployment.weights.name
    if deployment.parallel.tensor > 1:
        legal = f"1 with {flag}"
        hint = "One process is measured, which runs a whole copy."
        raise UsageError("--tensor-parallel", deployment.parallel.tensor, legal, hint)
    served = model.describe(weights)
    if options.calibration is not None:
        if options.calibrate:
            raise UsageError("--calibration", str(options.calibration), "without --calibrate")
        calibration = read_calibration(options.calibration)
        if calibration.model != served:
            legal = f"a calibration of what is planned: {served}"
            hint = f"This one is of {calibration.model}."
            raise UsageError("--calibration", str(options.calibration), legal, hint)
        return calibration
    if weights != model.geometry.dtype:
        legal = f"auto or {model.geometry.dtype} with --calibrate"
        raise UsageError("--weights", weights, legal, "The model runs as it is stored.")
    for cache in caches:
        with named_as_flags():
            formats = resolve_formats(model.geometry, cache, weights)
        if any(spec.static for spec in formats):
            hint = "To run static scales takes the scales, and a plan is given none."
            given = describe_formats(formats)
            raise UsageError("--formats", given, "dynamic scales with --calibrate", hint)
    # Loads torch and the model: the one part of planning that runs anything.
    from ascend_kv.evaluate.calibrate_steps import calibrate

    calibration = calibrate(options.model, served, caches)
    if options.save_calibration is not None:
        calibration.write(options.save_calibration)
    return calibration


def _calibrated_clocks(calibration: Calibration) -> ClockMaker:
    return lambda deployment, formats, _: calibration.clocks(describe_formats(formats))


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Errors name what stands on the command line, not the field that it becomes."""
    try:
        yield
    except UsageError as error:
        if error.field not in _FLAGS:
            raise
        raise UsageError(_FLAGS[error.field], error.given, error.legal, error.hint) from None
