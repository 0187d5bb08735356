"""``ascend-kv doctor``: what is here to run on, what is missing, and what to do about it.

``examine`` looks and never installs, downloads or changes anything. Nothing that is missing is an
error here: a machine without an NPU is a fine place for the CPU path. Broken is what stands in the
way, such as a torch_npu that does not load.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascend_kv import __version__
from ascend_kv.build_targets import CPU_LEVELS, OLDEST_CANN, cann_version, is_too_old
from ascend_kv.devices import DEVICES, get_device
from ascend_kv.errors import RunError
from ascend_kv.evaluate import twin
from ascend_kv.evaluate.console import Log, print_table, table_console
from ascend_kv.evaluate.finding import ABSENT, BROKEN, OK, WARNING, Finding
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.recipe_kinds import check_recipe, lint_any, recipe_kind
from ascend_kv.evaluate.surroundings import (
    chip_findings,
    numa,
    read_chips,
    settings,
    threads,
)
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes
from ascend_kv.whole_files import write_whole

# What the operators are compiled for, and what else tells CPUs apart.
_CPU_FEATURES = (
    *CPU_LEVELS["amx"], "avx512_bf16", "amx_bf16", "asimd", "asimdhp", "sve", "bf16",
)  # fmt: skip
_INSTALL = "pip install -c tools/constraints.txt -e ."
_INSTALL_NPU = 'pip install -c tools/constraints.txt -e ".[npu]"'
_SET_ENV = (
    "/usr/local/Ascend/cann/set_env.sh",
    "/usr/local/Ascend/ascend-toolkit/set_env.sh",
    "~/Ascend/cann/set_env.sh",
    "~/Ascend/ascend-toolkit/set_env.sh",
)
_NPU_SMI_SECONDS = 20


def run_doctor(
    log: Log,
    *,
    selftest: bool,
    quick: bool,
    device: str,
    as_json: bool,
    directory: Path | None,
    recipe: Path | None = None,
    model: str | None = None,
    target: str | None = None,
    strict: bool = False,
) -> None:
    """The command: look, test if asked to, print, write.

    Args:
        log: for progress.
        selftest: test every kernel that is built, too.
        quick: with few calls.
        device: where: ``npu``, ``cpu`` or ``auto``.
        as_json: print JSON instead of text.
        directory: where ``doctor.txt`` and ``doctor.json`` go; None: nowhere.
        recipe: one to look over; None: none.
        model: in place of the recipe's.
        target: the device that the recipe is for; None: the one that is here.
        strict: warnings are complaints too.

    Raises:
        UsageError: no such device here, or a recipe that cannot be read.
        RunError: after everything is printed and written: a kernel is wrong, something is broken,
            a recipe has an error (or, if strict, there is a warning).
        OSError: the report cannot be written.
    """
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    kind = recipe_kind(recipe) if recipe is not None else None
    if recipe is not None and kind is not None:
        check_recipe(recipe, kind, model)
    aim = get_device(target, "--target") if target is not None else None
    findings = examine()
    text = io.StringIO()
    console = table_console(file=text)
    console.print(as_text(findings), markup=False, highlight=False, soft_wrap=True)
    report: dict[str, Any] = {"environment": [finding._asdict() for finding in findings]}
    grave = (BROKEN, WARNING) if strict else (BROKEN,)
    complaints = [f"{f.name}: {f.value}" for f in findings if f.state in grave]
    torch_loads = all(f.state != BROKEN for f in findings if f.name == "torch")
    if recipe is not None and kind is not None and torch_loads:
        lints = lint_any(recipe, kind, aim, model)
        from ascend_kv.evaluate import lint  # with torch

        name = f"{recipe} ({kind.command})"
        console.print(lint.as_text(name, lints), markup=False, soft_wrap=True)
        report["recipe"] = {
            "path": str(recipe), "kind": kind.name, "lints": [x._asdict() for x in lints],
        }  # fmt: skip
        severities = ("error", "warning") if strict else ("error",)
        complaints += [f"{x.key}: {x.found}" for x in lints if x.severity in severities]
    if selftest and torch_loads:
        if not as_json:
            print(text.getvalue())
        tables, report["selftest"], wrong = _selftest(device, quick, log)
        complaints += wrong
        console.print()
        for table in tables:
            print_table(table, console)
            if not as_json:
                print_table(table, table_console())
    elif not as_json:
        print(text.getvalue(), end="")
    if as_json:
        print(json.dumps(report, indent=1))
    if directory is not None:
        write_whole(directory / "doctor.txt", text.getvalue())
        write_whole(directory / "doctor.json", json.dumps(report, indent=1))
        log.say(f"Report: {directory / 'doctor.txt'}, {directory / 'doctor.json'}")
    if complaints:
        raise RunError("; ".join(complaints))


def _selftest(
    device: str, quick: bool, log: Log
) -> tuple[list[TextTable], dict[str, Any], list[str]]:
    """Tables, JSON, and what is wrong."""
    from ascend_kv.evaluate import selftest, selftest_report
    from ascend_kv.ops import platform as device_platform

    where = device_platform.find_device() if device == "auto" else device
    device_platform.check_device(where)
    test = selftest.run_selftest(where, quick, log)
    wrong = [f"a wrong kernel: {name}" for name in test.wrong]
    return selftest_report.tables(test), selftest_report.as_json(test), wrong


def examine() -> list[Finding]:
    """Look at everything, from the outside in; what needs torch only where torch loads."""
    findings = [
        Finding("ascend_kv", OK, f"{__version__}, {Path(__file__).resolve().parents[1]}"),
        Finding("Python", OK, f"{platform.python_version()} ({platform.python_implementation()})"),
        *_processor(),
        *_driver(),
        *_cann(),
        settings(),
        *_libraries(),
        _twin(),
    ]
    cores = this_machine("cpu", 0).cores
    if any(found.name == "torch" and found.state == BROKEN for found in findings):
        return [*findings, threads(cores, None)]
    import torch

    device, finding = _device()
    return [
        *findings,
        threads(cores, torch.get_num_threads()),
        finding,
        _native(),
        *_operators(device),
    ]


def as_text(findings: Sequence[Finding]) -> str:
    """The findings as lines that can be pasted anywhere."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7} {finding.name:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"{'':<7} {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


def _processor() -> list[Finding]:
    machine = this_machine("cpu", 0)
    memory = (
        "memory unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    )
    value = f"{machine.processor}, {machine.cores} cores, {memory}, {platform.machine()}"
    flags = set(_read(Path("/proc/cpuinfo")).split())
    features = [name for name in _CPU_FEATURES if name in flags]
    return [
        Finding("system", OK, machine.system),
        Finding("processor", OK, value),
        Finding("CPU features", OK, " ".join(features) or "none of those that matter here"),
    ]


def _driver() -> list[Finding]:
    """The NPU's driver, as its own tool sees it, its chips, and where they are."""
    finding, said = _npu_smi()
    chips = read_chips(said)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return [finding, *chip_findings(chips), numa(chips, allowed)]


def _npu_smi() -> tuple[Finding, str]:
    """Whether the driver works, and what ``npu-smi info`` says."""
    tool = shutil.which("npu-smi") or "/usr/local/bin/npu-smi"
    if not Path(tool).exists():
        advice = "on a machine with an NPU, install its driver and firmware"
        return Finding("NPU driver", ABSENT, "npu-smi not found", advice), ""
    try:
        done = subprocess.run(
            [tool, "info"], capture_output=True, text=True, timeout=_NPU_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        advice = "run npu-smi info by hand; the driver may need a restart"
        return Finding("NPU driver", BROKEN, f"{tool}: {error}", advice), ""
    version = re.search(r"Version:\s*([\w.]+)", done.stdout)
    chips = re.findall(r"\b910B\w*(?:-\d)?|\b950\w*", done.stdout)
    if done.returncode or version is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        advice = "run npu-smi info by hand; in a container, pass the devices and driver in"
        value = said[0] if said else "npu-smi says nothing"
        return Finding("NPU driver", BROKEN, value, advice), ""
    counted = ", ".join(f"{chips.count(chip)} x {chip}" for chip in dict.fromkeys(chips))
    value = f"{version[1]}; {counted or 'no chip that is known here'}"
    return Finding("NPU driver", OK, value), done.stdout


def _cann() -> list[Finding]:
    """The toolkit whose ``set_env.sh`` was sourced."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        found = next((path for path in _SET_ENV if Path(path).expanduser().is_file()), None)
        if found:
            return [Finding("CANN", BROKEN, "installed, set_env.sh not sourced", f"source {found}")]
        wanted = f"install CANN {OLDEST_CANN}.0 or newer, then source its set_env.sh"
        advice = f"only an NPU needs it: {wanted}"
        return [Finding("CANN", ABSENT, "ASCEND_HOME_PATH is not set", advice)]
    if not Path(home).is_dir():
        advice = "source the set_env.sh of the CANN that is installed"
        return [Finding("CANN", BROKEN, f"ASCEND_HOME_PATH={home} is no directory", advice)]
    version = cann_version(Path(home))
    value = f"{version or 'version unknown'}, {home} (set_env.sh sourced)"
    if is_too_old(version):
        advice = f"the kernels want CANN {OLDEST_CANN}.0 or newer"
        return [Finding("CANN", BROKEN, value, advice)]
    return [Finding("CANN", OK, value)]


def _libraries() -> list[Finding]:
    findings = [_torch()]
    transformers = _version("transformers")
    if transformers:
        findings.append(Finding("transformers", OK, transformers))
    else:
        findings.append(Finding("transformers", BROKEN, "not installed", _INSTALL))
    torch, npu = _version("torch"), _version("torch_npu")
    if npu is None:
        advice = f"only an NPU needs it, and only after CANN: {_INSTALL_NPU}"
        return [*findings, Finding("torch_npu", ABSENT, "not installed", advice)]
    if torch and torch.split("+")[0].split(".")[:2] != npu.split(".")[:2]:
        advice = f"their versions must be equal: {_INSTALL_NPU}"
        return [*findings, Finding("torch_npu", BROKEN, f"{npu} beside torch {torch}", advice)]
    return [*findings, Finding("torch_npu", OK, npu)]


def _torch() -> Finding:
    """Whether torch loads: where torch_npu is installed without CANN it does not."""
    version = _version("torch")
    if version is None:
        return Finding("torch", BROKEN, "not installed", _INSTALL)
    try:
        importlib.import_module("torch")
    except Exception as error:  # torch_npu loads with it and may raise anything
        advice = "source CANN's set_env.sh, or, without an NPU, pip uninstall torch_npu"
        value = f"{version} does not load: {type(error).__name__}: {error}"
        return Finding("torch", BROKEN, value, advice)
    return Finding("torch", OK, version)


def _device() -> tuple[str, Finding]:
    from ascend_kv.ops import platform as device_platform

    try:
        device = device_platform.find_device()
        if device == "cpu":
            return device, Finding("device", OK, "cpu; no NPU is used")
        name = device_platform.device_name(device)
        free, total = (
            format_bytes(read(device))
            for read in (device_platform.free_memory_bytes, device_platform.total_memory_bytes)
        )
    except RunError as error:
        advice = "source CANN's set_env.sh, or uninstall torch_npu to use the CPU"
        return "cpu", Finding("device", BROKEN, str(error), advice)
    if name not in DEVICES:
        advice = f"its limits are not known here; known: {', '.join(DEVICES)}"
        return device, Finding("device", OK, f"npu, {name}, {free} of {total} free", advice)
    return device, Finding("device", OK, f"npu, {name}, {free} of {total} free")


def _twin() -> Finding:
    lacking = twin.missing()
    if lacking:
        return Finding("kernel twin", ABSENT, "cannot run", lacking)
    compiler = twin.load_module("launch").find_compiler()
    return Finding("kernel twin", OK, f"can run the kernels' sources on this CPU ({compiler})")


def _native() -> Finding:
    """The operators compiled for a CPU."""
    from ascend_kv.ops import native

    problem = native.find_problem(native.LIBRARY)
    if problem:
        return Finding("native CPU code", ABSENT, problem, f"with a C++ compiler: {_INSTALL}")
    if os.environ.get(native.VARIABLE) == "reference":
        return Finding("native CPU code", OK, f"built; {native.VARIABLE}=reference leaves it out")
    bits = native.whole_number_bits()
    how = f"whole numbers of {bits} bits" if bits else "float32"
    built = f"built for this CPU and this torch; attention over codes in {how}"
    return Finding("native CPU code", OK, built)


def _operators(device: str) -> list[Finding]:
    """Which code serves which operators."""
    from ascend_kv.ops import platform as device_platform

    served = device_platform.implementations(device)
    by_code = [
        Finding(f"{how} on {device}", OK, ", ".join(n for n, by in served.items() if by == how))
        for how in dict.fromkeys(served.values())
    ]
    return [
        *by_code,
        Finding("CANN's attention", OK, device_platform.describe_attention(device)),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
