"""``ascend-kv plan --calibrate`` and ``--calibration``: clocks that this machine has set."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ascend_kv.config import CacheConfig
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.plan_arguments import named_as_flags
from ascend_kv.plan.calibration import Calibration, read_calibration
from ascend_kv.plan.capacity import describe_formats
from ascend_kv.plan.deployment import ClockMaker, Deployment
from ascend_kv.resolved_cache import resolve_formats


def wanted_calibration(
    options: argparse.Namespace, deployment: Deployment, caches: Sequence[CacheConfig]
) -> Calibration | None:
    """What the flags ask for: measured now, read from a file, or none.

    Raises:
        UsageError: flags that do not go together, or a file of another model.
    """
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
        hint = f"{flag} is about this machine."
        raise UsageError("--device", options.device, f"cpu with {flag}", hint)
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


def calibrated_clocks(calibration: Calibration) -> ClockMaker:
    """Clocks of each format that was measured."""
    return lambda deployment, formats, _: calibration.clocks(describe_formats(formats))
