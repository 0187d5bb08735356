"""The build of the NPU kernels without CANN: who builds what when, and what is said otherwise."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import npu_host
import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = """
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     910B3               | OK            | 93.4        47                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3161 / 65536         |
"""


@pytest.fixture
def build_npu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("build_npu", ROOT / "tools" / "build_npu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("ASCEND_HOME_PATH", "SOC_VERSION", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts scripts of these names on a PATH that holds nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return add


def test_nothing_changes_without_cann(build_npu: ModuleType) -> None:
    given = {"ext_modules": ["cpu"], "cmdclass": {"build_ext": object}}
    assert build_npu.add_npu_kernels(given) is given


def test_chip_from_the_environment(build_npu: ModuleType, programs: Any) -> None:
    programs("npu-smi", "exit 1")
    for chip in ("Ascend910B1", "Ascend910B4-1", "Ascend910_9382"):
        assert build_npu.find_soc_version({"SOC_VERSION": chip}) == chip
    # Ascend910B alone is another chip to CANN
    for chip in ("910B3", "Ascend310P3", "Ascend910B", "Ascend910A", "Ascend950PR_9599"):
        with pytest.raises(build_npu.BuildProblem, match=rf"SOC_VERSION is {chip}, .*Ascend910B1"):
            build_npu.find_soc_version({"SOC_VERSION": chip})


def test_chip_from_npu_smi(build_npu: ModuleType, programs: Any) -> None:
    programs("npu-smi", f"[ $1 = info ] || exit 1\n/bin/cat <<'END'\n{TABLE}\nEND")
    assert build_npu.find_soc_version({}) == "Ascend910B3"
    assert build_npu.find_soc_version({"SOC_VERSION": "Ascend910B1"}) == "Ascend910B1"


@pytest.mark.parametrize("script", [None, "exit 3", "echo dcmi module initialize failed"])
def test_no_chip(build_npu: ModuleType, programs: Any, script: str | None) -> None:
    if script is not None:
        programs("npu-smi", script)
    with pytest.raises(build_npu.BuildProblem, match="SOC_VERSION=Ascend910B3.*ASCEND_HOME_PATH"):
        build_npu.find_soc_version({})


def test_cmake_is_found_or_asked_for(
    build_npu: ModuleType, programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    with pytest.raises(build_npu.BuildProblem, match="no CMake here. Install it"):
        build_npu.find_cmake()
    programs("cmake", "")
    assert build_npu.find_cmake().endswith("/bin/cmake")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert build_npu.find_cmake().endswith("/bin/cmake")


def test_cann_is_checked(build_npu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(build_npu.BuildProblem, match="nowhere is no folder. Source CANN's set_env"):
        build_npu.check_cann(tmp_path / "nowhere")
    assert build_npu.check_cann(tmp_path) == tmp_path  # it does not tell its version
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    for version in ("9.0.0", "CANN-9.1.RC1", "10.0.0"):
        info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\n")
        assert build_npu.check_cann(tmp_path) == tmp_path
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    with pytest.raises(build_npu.BuildProblem, match=r"version 8\.5\.0, 9\.0 or newer"):
        build_npu.check_cann(tmp_path)


def test_packages_are_found_or_asked_for(build_npu: ModuleType) -> None:
    assert (build_npu.find_package("torch") / "lib").is_dir()
    with pytest.raises(build_npu.BuildProblem, match="no_such_package is not installed"):
        build_npu.find_package("no_such_package")


# A build_ext of someone else, as setup.py may bring it, and a cmake that makes the library.
SETUP = """
import sys
sys.path.insert(0, {tools!r})
from pathlib import Path
import build_npu
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

class Others(build_ext):
    def build_extensions(self):
        assert [ext.name for ext in self.extensions] == ["package.other"]
        target = Path(self.get_ext_fullpath("package.other"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("other")

build_npu.MODULE = "package._npu"
build_npu.find_package = lambda name: Path("/packages") / name
other = Extension("package.other", ["a.c"])
arguments = {{"ext_modules": [other], "cmdclass": {{"build_ext": Others}}}}
setup(name="package", packages=["package"], **build_npu.add_npu_kernels(arguments))
"""
CMAKE = """
echo "$@" >> {log}
if [ "$1" = --build ]; then echo kernels > $2/libascend_kv_npu.so; else /bin/mkdir -p $4; fi
"""


@pytest.mark.parametrize("cann", [True, False])
def test_setup_builds_beside_other_extensions(
    build_npu: ModuleType, tmp_path: Path, programs: Any, cann: bool
) -> None:
    log = tmp_path / "log"
    programs("cmake", CMAKE.format(log=log))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "setup.py").write_text(SETUP.format(tools=str(ROOT / "tools")))
    environ = {"PATH": os.environ["PATH"], "SOC_VERSION": "Ascend910B2", "MAX_JOBS": "3"}
    if cann:
        environ["ASCEND_HOME_PATH"] = str(tmp_path)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {
        path.name.split(".")[0]: path.read_text() for path in (tmp_path / "package").glob("*.so")
    }
    assert built == ({"other": "other", "_npu": "kernels\n"} if cann else {"other": "other"})
    if not cann:
        assert not log.exists()
        return
    configure, make = log.read_text().splitlines()
    for part in (
        *(f"-S {ROOT / 'op_kernels'}", "-DASCEND_KV_NPU=ON", f"-DASCEND_HOME_PATH={tmp_path}"),
        *("-DSOC_VERSION=Ascend910B2", "-DTORCH_DIR=/packages/torch "),
        "-DTORCH_NPU_DIR=/packages/torch_npu",
    ):
        assert part in f"{configure} "
    assert make.endswith("--target npu -j 3")


def test_a_failed_build_says_which_command(
    build_npu: ModuleType, tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("cmake", "exit 1")
    monkeypatch.setattr(build_npu, "find_package", lambda name: Path("/packages") / name)
    environ = {"ASCEND_HOME_PATH": str(tmp_path), "SOC_VERSION": "Ascend910B1"}
    with pytest.raises(build_npu.BuildProblem, match="cmake -S .* failed, its output is above"):
        build_npu.build(tmp_path / "library.so", tmp_path / "build", environ)


ASCENDC = """
function(ascendc_library target kind)
    message(STATUS "kernels: ${ARGN}")
    file(WRITE ${CMAKE_BINARY_DIR}/none.cpp "")
    add_library(${target} ${kind} ${CMAKE_BINARY_DIR}/none.cpp)
endfunction()
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_cmake_configures(tmp_path: Path) -> None:
    """With CANN's CMake functions stood in; nothing is compiled."""

    def configure(*settings: str) -> subprocess.CompletedProcess[str]:
        command = ["cmake", "-S", str(ROOT / "op_kernels"), "-B", str(tmp_path / "build")]
        command += ["-DASCEND_KV_NPU=ON", "-DASCEND_KV_TWIN=OFF", *settings]
        environ = {k: v for k, v in os.environ.items() if k != "ASCEND_HOME_PATH"}
        return subprocess.run(command, capture_output=True, text=True, env=environ)

    cann = tmp_path / "cann"
    settings = [
        *(f"-DASCEND_HOME_PATH={cann}", f"-DTORCH_DIR={tmp_path}", f"-DTORCH_NPU_DIR={tmp_path}"),
        "-DSOC_VERSION=Ascend910B3",
    ]
    assert "SOC_VERSION is not set" in configure(*settings[:-1]).stderr
    assert "no ASCENDC_CMAKE_DIR" in configure(*settings).stderr
    functions = cann / "compiler" / "tikcpp" / "ascendc_kernel_cmake" / "ascendc.cmake"
    functions.parent.mkdir(parents=True)
    functions.write_text(ASCENDC)
    header = cann / "include" / "tiling" / "platform" / "platform_ascendc.h"
    header.parent.mkdir(parents=True)
    header.touch()
    done = configure(*settings)
    assert done.returncode == 0, done.stderr
    kernels = next(line for line in done.stdout.splitlines() if line.startswith("-- kernels: "))
    expected = {str(entry.source) for entry in npu_host.entries()}
    assert set(kernels.removeprefix("-- kernels: ").split(";")) == expected
