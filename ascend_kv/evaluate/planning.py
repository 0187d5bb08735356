"""``ascend-kv plan``: what fits, how many at once and how fast, by policy; loads no torch.

Only ``--calibrate`` does, which runs the engine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ascend_kv.config import CacheConfig, SchedulerConfig
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.plan_arguments import named_as_flags, settle, whole_numbers
from ascend_kv.evaluate.plan_calibrated import calibrated_clocks, wanted_calibration
from ascend_kv.geometry import FORMATS
from ascend_kv.plan.calibration import Calibration
from ascend_kv.plan.deployment import (
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
                legal = f"910B1 to 910B3, 950PR or 950DT with {flag}, or cpu and --calibrate"
                hint = f"No speed is predicted: {self.why_no_speed(policy)}."
                raise UsageError("--device", self.deployment.hardware.name, legal, hint)


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
    calibration = wanted_calibration(options, deployment, caches)
    if model.geometry.compressed is not None:
        costs = {name: each for name, (each, _) in sparse_stacks(deployment.weights).items()}
        with named_as_flags():
            sparse = [plan_sparse_policy(deployment, cache, costs) for cache in caches]
        return Plan(deployment, sparse, arrivals, None)
    maker = calibrated_clocks(calibration) if calibration else roofline_clocks(
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
    if math.isnan(rate):
        raise UsageError("--simulate", given, "requests a second, or inf")
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
