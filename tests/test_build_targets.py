"""What is built and what the doctor says of a machine: one table of features, one reader of CANN's
version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ascend_kv import build_targets
from ascend_kv.evaluate import doctor
from ascend_kv.evaluate.finding import BROKEN, OK, Finding

ROOT = Path(__file__).resolve().parents[1]
TOOLKIT = "x86_64-linux/ascend_toolkit_install.info"


def finding(name: str) -> Finding:
    return next(found for found in doctor.examine() if found.name == name)


@pytest.mark.parametrize(
    ("files", "version", "serves"),
    [
        ({TOOLKIT: "version=9.0.0", "compiler/version.info": "Version=7.6.0.1"}, "9.0.0", True),
        ({TOOLKIT: "version=8.5.1", "compiler/version.info": "Version=9.0.0"}, "8.5.1", False),
        ({"version.cfg": "runtime_running_version=[8.5.0:CANN-8.5]"}, "8.5.0", False),
        ({"version.info": "Version=CANN-9.1.RC1"}, "9.1.RC1", True),
        ({"other": "version=8.0"}, None, True),
    ],
)
def test_the_build_and_the_doctor_see_the_same_cann(
    files: dict[str, str],
    version: str | None,
    serves: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("setuptools")
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delitem(sys.modules, "build_npu", raising=False)
    import build_npu

    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"package=x\n{text}\narch=x86_64\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    cann = finding("CANN")
    assert cann.value.split(",")[0] == (version or "version unknown")
    assert cann.state == (OK if serves else BROKEN)
    if serves:
        assert build_npu.check_cann(tmp_path) == tmp_path
    else:
        with pytest.raises(build_npu.BuildProblem, match=f"version {version}, 9.0 or newer"):
            build_npu.check_cann(tmp_path)


def test_the_doctor_names_every_feature_that_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = {name for level in build_targets.CPU_LEVELS.values() for name in level}
    monkeypatch.setattr(doctor, "_read", lambda _: "flags : fpu " + " ".join(features))
    assert set(finding("CPU features").value.split()) == features
