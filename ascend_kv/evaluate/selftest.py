"""``ascend-kv doctor --selftest``: every kernel that is built, against the operators' references.

On an NPU the kernels run there. On a CPU the same list runs through native CPU kernels, where some
are built, and through the CPU twin, which computes as the NPU documents and checks its rules, but
is a simulation.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ascend_kv.devices import DEVICES, get_device
from ascend_kv.evaluate import rooflines, twin
from ascend_kv.evaluate.compare_kernels import Difference, compare
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.kernel_workloads import Workload, deepseek_workloads, qwen_workloads
from ascend_kv.evaluate.selftest_cases import Case, draw_cases
from ascend_kv.ops import platform
from ascend_kv.ops.registration import NAMESPACE
from ascend_kv.plan.roofline import floor_seconds

Tensor = torch.Tensor
Kernel = Callable[..., Any]
"""An operator's arguments in, its result out."""

TWIN, NATIVE, NPU = "CPU twin", "native CPU code", "NPU"
LABELS = {
    TWIN: "CPU twin: simulated, not an NPU",
    NATIVE: "native CPU code, run on this CPU",
    NPU: "run on this NPU",
}
CASES, QUICK_CASES = 40, 5
_PLAIN = ("native", "reference")
TWIN_DEVICE = "910B1"
"""Whose cores and peaks the rooflines on a CPU use."""
WARM_UP_CALLS, TIMED_CALLS = 5, 50


class Verdict(NamedTuple):
    """What came of one operator on one implementation.

    Attributes:
        cases: how many calls were made.
        difference: the largest of all calls.
        failures: for each call that is wrong, its sizes and what is wrong with it.
    """

    operator: str
    implementation: str
    cases: int
    difference: Difference
    failures: list[str]

    @property
    def passed(self) -> bool:
        """No call was wrong."""
        return not self.failures


class Speed(NamedTuple):
    """One workload, timed on the NPU."""

    workload: Workload
    unavoidable_bytes: int
    seconds: float
    floor_seconds: float | None


class SelfTest(NamedTuple):
    """Everything that the self-test found.

    Attributes:
        implementations: what was tested.
        verdicts: of each operator on each implementation.
        not_built: operators whose kernel is not built for this NPU: their reference serves.
        partly: operators whose kernel handed some of the calls to the reference, and which.
        speeds: on an NPU, measured.
        rooflines: on a CPU, simulated and predicted, for a ``TWIN_DEVICE``.
    """

    implementations: list[str]
    verdicts: list[Verdict]
    not_built: list[str]
    partly: dict[str, str]
    speeds: list[Speed]
    rooflines: list[rooflines.Row]

    @property
    def wrong(self) -> list[str]:
        """The kernels that are wrong."""
        return [f"{v.operator} ({v.implementation})" for v in self.verdicts if not v.passed]


def run_selftest(device: str, quick: bool, log: Log) -> SelfTest:
    """Test what is built.

    Args:
        device: ``npu`` or ``cpu``.
        quick: few calls and small workloads.
        log: for progress.

    Raises:
        RunError: on a CPU, the twin cannot run or does not compile.
    """
    count = QUICK_CASES if quick else CASES
    if device == "cpu":
        with log.bar("compiling for the CPU twin", len(twin.OPERATORS), "kernels") as advance:
            twin.build_kernels(advance)
    kernels = find_kernels(device)
    verdicts = []
    with log.bar("kernels against references", len(kernels) * count, "calls") as advance:
        for (operator, implementation), kernel in kernels.items():
            where = "npu" if implementation == NPU else "cpu"
            cases = draw_cases(operator, count)
            verdicts.append(judge(operator, implementation, kernel, cases, where, advance))
    built = {operator for operator, _ in kernels}
    not_built = [name for name in twin.OPERATORS if name not in built]
    workloads = [w for w in _workloads(quick) if w.operator in built]
    speeds, rows = [], []
    served = platform.implementations(device)
    partly = {name: served[name] for name in twin.OPERATORS if served[name] not in _PLAIN}
    with log.bar("workloads", len(workloads), "workloads") as advance:
        if device == "npu":
            speeds = [_measure(workload, advance) for workload in workloads]
        else:
            rows = rooflines.simulate(workloads, get_device(TWIN_DEVICE), advance)
    implementations = list(dict.fromkeys(implementation for _, implementation in kernels))
    return SelfTest(implementations, verdicts, not_built, partly, speeds, rows)


def find_kernels(device: str) -> dict[tuple[str, str], Kernel]:
    """What can be tested on a device: operator and implementation -> the kernel.

    Raises:
        RunError: on a CPU, the twin cannot run.
    """
    served = platform.implementations(device)
    native = NPU if device == "npu" else NATIVE
    found: dict[tuple[str, str], Kernel] = {
        (name, native): getattr(getattr(torch.ops, NAMESPACE), name)
        for name in twin.OPERATORS
        if served[name] != "reference"
    }
    if device == "cpu":
        operators = twin.require_twin()
        found |= {(name, TWIN): _on_twin(operators, name) for name in twin.OPERATORS}
    return found


def _on_twin(operators: Any, name: str) -> Kernel:
    """An operator on the twin; each call with another number of cores."""
    calls = 0

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        limits = operators.Limits(cores=(48, 40, 7, 1)[calls % 4], seed=calls)
        result, _ = getattr(operators, name)(*args, **kwargs, limits=limits)
        return result

    return kernel


def reference_of(operator: str) -> Kernel:
    """The reference itself, whatever kernel serves the operator on a CPU."""
    found: Kernel = importlib.import_module(f"ascend_kv.ops.{operator}")._reference
    return found


def judge(
    operator: str,
    implementation: str,
    kernel: Kernel,
    cases: Sequence[Case],
    device: str,
    advance: Callable[[int], None],
) -> Verdict:
    """Call a kernel and the reference with the same arguments and compare all they leave behind."""
    largest, failures = Difference(), []
    exact = implementation == TWIN
    for case in cases:
        wanted = _call(reference_of(operator), case, "cpu")
        try:
            difference = compare(_call(kernel, case, device), wanted, case.pooled)
        except Exception as error:  # a broken rule of the twin, or whatever the device says
            failures.append(f"{case.sizes}: {type(error).__name__}: {error}")
        else:
            largest = largest.larger(difference)
            complaint = difference.complaint(exact, case.pooled)
            if complaint:
                failures.append(f"{case.sizes}: {complaint}")
        advance(1)
    return Verdict(operator, implementation, len(cases), largest, failures)


def _call(kernel: Kernel, case: Case, device: str) -> list[Tensor]:
    """Every tensor that the call leaves behind: those it was given, and its results; on the CPU."""
    args = [_moved(x, device) for x in case.args]
    kwargs = {name: _moved(x, device) for name, x in case.kwargs.items()}
    result = kernel(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    left = [*args, *kwargs.values(), *results]
    return [x.cpu() for x in left if isinstance(x, Tensor)]


def _moved(x: Any, device: str) -> Any:
    """A copy on the device; a slice stays a slice of a copy."""
    if not isinstance(x, Tensor):
        return x
    if x.is_contiguous():
        return x.to(device, copy=True)
    whole = x._base if x._base is not None else x
    return whole.to(device, copy=True).as_strided(x.size(), x.stride(), x.storage_offset())


def _workloads(quick: bool) -> list[Workload]:
    batches, tokens = ((128,), 1024) if quick else ((1, 32, 128), 8192)
    return qwen_workloads(batches, tokens) + deepseek_workloads(batches, tokens)


def _measure(workload: Workload, advance: Callable[[int], None]) -> Speed:
    """Mean time of many calls in a row, by the wall clock."""
    call = workload.build()
    args = [_moved(x, "npu") for x in call.args]
    kwargs = {name: _moved(x, "npu") for name, x in call.kwargs.items()}
    kernel = getattr(getattr(torch.ops, NAMESPACE), workload.operator)
    for _ in range(WARM_UP_CALLS):
        kernel(*args, **kwargs)
    platform.synchronize("npu")
    started = time.perf_counter()
    for _ in range(TIMED_CALLS):
        kernel(*args, **kwargs)
    platform.synchronize("npu")
    seconds = (time.perf_counter() - started) / TIMED_CALLS
    advance(1)
    known = DEVICES.get(platform.device_name("npu"))
    rated = known is not None and known.rates is not None
    floor = floor_seconds(call.unavoidable_bytes, known) if known and rated else None
    return Speed(workload, call.unavoidable_bytes, seconds, floor)
