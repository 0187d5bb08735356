"""``ascend-kv doctor``: what it finds on machines made up here, and the self-test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import fill_disk
from kernel_harness import needs_compiler

from ascend_kv import cli
from ascend_kv.errors import RunError
from ascend_kv.evaluate import doctor, selftest, selftest_report, twin
from ascend_kv.evaluate.console import Log, table_console
from ascend_kv.evaluate.doctor import ABSENT, BROKEN, OK, Finding
from ascend_kv.evaluate.selftest_cases import Case, draw_cases
from ascend_kv.ops import native

NPU_SMI = """\
#!/bin/sh
echo '| npu-smi 25.5.0                   Version: 25.5.0.b060                |'
echo '| 0     910B3               | OK            | 90.1        38           |'
echo '| 1     910B3               | OK            | 91.0        39           |'
"""


def finding(name: str) -> Finding:
    return next(found for found in doctor.examine() if found.name == name)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without anything of Ascend's; its folder of programs."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setattr(doctor, "_SET_ENV", (str(tmp_path / "set_env.sh"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def npu_smi(folder: Path, script: str) -> None:
    tool = folder / "npu-smi"
    tool.write_text(script)
    tool.chmod(0o755)


def test_a_machine_without_an_npu(bare: Path) -> None:
    assert finding("NPU driver").state == ABSENT
    cann = finding("CANN")
    assert cann.state == ABSENT and "ASCEND_HOME_PATH" in cann.value
    assert "set_env.sh" in cann.advice
    npu = finding("torch_npu")
    assert npu.state == ABSENT and '".[npu]"' in npu.advice
    release, named = torch.__version__.split("+")[0], finding("torch").value
    assert named.split("+")[0] == release  # a wheel may not name its build
    assert finding("device").value.startswith("cpu")
    served = [found for found in doctor.examine() if found.name.endswith(" on cpu")]
    assert sum("kv_cache_store" in found.value for found in served) == 1
    assert finding("CANN's attention").value == "not used: it is for the NPU"
    assert not [found for found in doctor.examine() if found.state == BROKEN]


def test_cann_that_is_installed_and_not_sourced(bare: Path) -> None:
    (bare / "set_env.sh").touch()
    cann = finding("CANN")
    assert cann.state == BROKEN and cann.advice == f"source {bare / 'set_env.sh'}"


@pytest.mark.parametrize(
    ("file", "text", "state", "version"),
    [
        ("version.cfg", "# v\nruntime_running_version=[9.0.0:CANN-9.0]\n", OK, "9.0.0"),
        ("compiler/version.info", "Version=9.1.0.beta1\n", OK, "9.1.0.beta1"),
        ("x86_64-linux/ascend_toolkit_install.info", "version=8.5.1\n", BROKEN, "8.5.1"),
        ("other", "version=9.0\n", OK, "version unknown"),
    ],
)
def test_cann_versions(
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    text: str,
    state: str,
    version: str,
) -> None:
    home = bare / "cann"
    (home / file).parent.mkdir(parents=True)
    (home / file).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    cann = finding("CANN")
    assert (cann.state, cann.value.split(",")[0]) == (state, version)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home / "gone"))
    assert finding("CANN").state == BROKEN


def test_the_driver(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_smi(bare, NPU_SMI)
    assert finding("NPU driver") == Finding("NPU driver", OK, "25.5.0.b060; 2 x 910B3")
    npu_smi(bare, "#!/bin/sh\necho 'dcmi module initialize failed. ret is -8005'\nexit 1\n")
    driver = finding("NPU driver")
    assert driver.state == BROKEN and "-8005" in driver.value and driver.advice

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("npu-smi", 20)

    monkeypatch.setattr(subprocess, "run", hang)
    assert finding("NPU driver").state == BROKEN


def test_torch_npu_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "torch_npu": "2.12.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert finding("torch_npu").state == BROKEN
    versions["torch_npu"] = "2.13.0.post1"
    assert finding("torch_npu").state == OK
    del versions["transformers"]
    assert finding("transformers").state == BROKEN


def test_native_cpu_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "gone.so")
    code = finding("native CPU code")
    assert code.state == ABSENT and "pip install" in code.advice
    monkeypatch.setattr(native, "find_problem", lambda _: None)
    for bits, how in ((16, "16 bits"), (24, "24 bits"), (None, "codes in float32")):
        monkeypatch.setattr(native, "whole_number_bits", lambda bits=bits: bits)
        code = finding("native CPU code")
        assert code.value.startswith("built for this CPU") and code.value.endswith(how)
    monkeypatch.setenv(native.VARIABLE, "reference")
    assert "leaves it out" in finding("native CPU code").value


def test_torch_that_does_not_load(tmp_path: Path) -> None:
    """As where torch_npu is installed and CANN is not: everything else is still looked at."""
    (tmp_path / "torch.py").write_text("raise OSError('libhccl.so: cannot open shared object')")
    code = "import sys; from ascend_kv.cli import main; sys.exit(main(['doctor']))"
    path = f"{tmp_path}{os.pathsep}{Path(doctor.__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 1 and "libhccl.so" in done.stderr and "Traceback" not in done.stderr
    assert "broken  torch" in done.stdout and "pip uninstall torch_npu" in done.stdout
    assert "NPU driver" in done.stdout


def test_what_is_broken_ends_with_code_1(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ok ") and "\nabsent  NPU driver" in shown and " -> " in shown
    (bare / "set_env.sh").touch()
    assert cli.main(["doctor", "--json", "--output", str(tmp_path / "a" / "b")]) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report == json.loads((tmp_path / "a" / "b" / "doctor.json").read_text())
    assert {"name", "state", "value", "advice"} == set(report["environment"][0])
    assert "CANN: installed, set_env.sh not sourced" in printed.err
    assert "broken  CANN" in (tmp_path / "a" / "b" / "doctor.txt").read_text()


@pytest.mark.parametrize("name", ["doctor.txt", "doctor.json"])
def test_an_older_report_outlives_a_full_disk(
    bare: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, tmp_path / name)
    assert cli.main(["doctor", "--output", str(tmp_path)]) == 1
    assert (tmp_path / name).read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick"], "--quick: got True; legal: together with --selftest"),
        (["--device", "cpu"], "--device: got 'cpu'; legal: together with --selftest"),
        (["--selftest", "--device", "npu"], "device: got 'npu'"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("operator", twin.OPERATORS)
def test_cases_are_the_same_every_time_and_the_references_take_them(operator: str) -> None:
    for case, again in zip(draw_cases(operator, 12), draw_cases(operator, 12), strict=True):
        assert case.sizes == again.sizes
        for one, other in zip(case.args, again.args, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())
        left = selftest._call(selftest.reference_of(operator), case, "cpu")
        assert left[0] is not case.args[0]  # what a call writes is a copy


def test_a_slice_stays_a_slice_of_a_copy() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    part = whole[:, 1:]
    moved = selftest._moved(part, "cpu")
    assert torch.equal(moved, part) and moved.stride() == part.stride()
    moved.fill_(0)
    assert whole.sum() == 276


@needs_compiler
def test_selftest_on_the_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--selftest", "--quick", "--device", "cpu", "--output", str(tmp_path)]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["selftest"]
    assert "CPU twin: simulated, not an NPU" in report["labels"]
    assert report["passed"] and not report["not_built"] and not report["measured"]
    verdicts = {v["operator"]: v for v in report["kernels"] if v["implementation"] == "CPU twin"}
    assert set(verdicts) == set(twin.OPERATORS)
    for verdict in verdicts.values():
        assert verdict["calls"] == selftest.QUICK_CASES and verdict["max_code_difference"] == 0
    assert "predicted" in report["simulated"]["label"]
    text = (tmp_path / "doctor.txt").read_text()
    assert "CPU twin: simulated, not an NPU" in text and "pass" in text and "Python" in text


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(twin.load_module("launch"), "find_compiler", lambda: None)
    assert finding("kernel twin").advice.startswith("there is no C++ compiler")
    assert cli.main(["doctor", "--selftest", "--device", "cpu"]) == 1
    assert "install g++ or clang++" in capsys.readouterr().err
    monkeypatch.setattr(twin, "KERNELS", Path("/nowhere/op_kernels"))
    assert "pip install -e ." in finding("kernel twin").advice


def wrong_codes(case: Case) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        codes, *scales = selftest.reference_of(case.operator)(*args, **kwargs)
        codes.view(-1)[0] += 1
        return (codes, *scales)

    return kernel


def test_a_wrong_kernel_is_found() -> None:
    (case, *_) = cases = draw_cases("kv_cache_quantize", 3)

    def judge(kernel: Any, implementation: str = selftest.TWIN) -> selftest.Verdict:
        return selftest.judge(case.operator, implementation, kernel, cases, "cpu", lambda _: None)

    reference = selftest.reference_of(case.operator)
    assert judge(reference).passed
    verdict = judge(wrong_codes(case))
    assert not verdict.passed and len(verdict.failures) == 3
    assert "1 codes off, allowed 0" in verdict.failures[0] and case.sizes in verdict.failures[0]
    # a device may divide less exactly than the twin
    assert judge(wrong_codes(case), selftest.NPU).passed

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("[ub-bounds] file.cpp:3")

    assert "RuntimeError: [ub-bounds] file.cpp:3" in judge(breaks).failures[2]


def test_a_wrong_kernel_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = draw_cases("kv_cache_quantize", 1)[0]
    kernels = {("kv_cache_quantize", selftest.NATIVE): lambda *_, **__: 1 / 0}
    monkeypatch.setattr(selftest, "find_kernels", lambda _: kernels)
    monkeypatch.setattr(selftest.twin, "build_kernels", lambda _: None)
    monkeypatch.setattr(selftest, "_workloads", lambda _: [])
    assert cli.main(["doctor", "--selftest", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "a wrong kernel: kv_cache_quantize (native CPU code)" in printed.err
    assert "WRONG in 40" in printed.out and "ZeroDivisionError" in printed.out
    assert case.sizes in " ".join(printed.out.split())


def test_on_an_npu_speeds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NPU's way with the references in its kernels' place, on this CPU."""
    served = dict.fromkeys(twin.OPERATORS, "native")
    served["hca_decompress"] = "reference"
    served["kv_cache_load"] = "native; reference for scales by group (1 calls)"
    moved = selftest._moved
    monkeypatch.setattr(selftest, "_moved", lambda x, device: moved(x, "cpu"))
    monkeypatch.setattr(selftest.platform, "implementations", lambda _: served)
    monkeypatch.setattr(selftest.platform, "synchronize", lambda _: None)
    monkeypatch.setattr(selftest.platform, "device_name", lambda _: "910B2")
    small = [*selftest.qwen_workloads((1,), 16), *selftest.deepseek_workloads((1,), 128)]
    monkeypatch.setattr(selftest, "_workloads", lambda _: small)
    monkeypatch.setattr(twin, "require_twin", lambda: pytest.fail("no twin on an NPU"))
    test = selftest.run_selftest("npu", True, Log(table_console(stderr=True)))
    assert test.implementations == [selftest.NPU] and not test.wrong and not test.rooflines
    assert test.not_built == ["hca_decompress"]
    assert list(test.partly) == ["kv_cache_load"]
    tested = {speed.workload.operator for speed in test.speeds}
    assert tested == set(twin.OPERATORS) - {"hca_decompress"}
    for speed in test.speeds:
        assert speed.seconds > 0 and (speed.floor_seconds or 0) > 20e-6
    report = selftest_report.as_json(test)
    assert report["labels"] == ["run on this NPU"] and report["simulated"] is None
    verdicts, speeds = selftest_report.tables(test)
    assert "hca_decompress: no kernel is built here, the reference serves it" in verdicts.notes
    assert speeds.title == "Bandwidth (measured on this NPU; the floor is predicted)"
    monkeypatch.setattr(selftest.platform, "device_name", lambda _: "910B4")
    assert selftest._measure(test.speeds[0].workload, lambda _: None).floor_seconds is None


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, launch = twin.load_module("operators"), twin.load_module("launch")

    def fail(name: str) -> None:
        raise launch.BuildError("error: expected ';'")

    monkeypatch.setattr(twin, "missing", lambda: None)
    monkeypatch.setattr(operators, "kernels", fail)
    with pytest.raises(RunError, match="compiling kv_cache_quantize .* expected ';'"):
        twin.build_kernels(lambda _: None)
