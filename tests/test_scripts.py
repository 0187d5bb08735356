"""The two commands and what they promise, played with a stand-in for Python; nothing is installed.

The stand-in writes down how it was called, makes an environment that holds copies of itself, and
fails where a test wants it to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ascend_kv.build_targets import CPU_LEVELS

ROOT = Path(__file__).resolve().parents[1]
RECIPE, TESTS, CI = "recipes/run_qwen_910b.sh", "tests/run.sh", ".ci/run"
SCRIPTS = (RECIPE, TESTS, CI, "tools/setup_env.sh")
REQUIREMENTS = (
    *("pyproject.toml", "setup.py", "tools/constraints.txt"),
    "ascend_kv/build_targets.py",  # setup.py reads it
)
COPIED = (*SCRIPTS, *REQUIREMENTS)

STAND_IN = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"$CALLS"
fails() { [[ " ${FAIL:-} " == *" $1 "* ]] && exit 1; }
for word; do [[ $word == */constraints.txt && ! -f $word ]] && exit 1; done
case $1 in
  -V) echo "Python ${VERSION:-3.10.0}" ;;
  -c) exec REAL -c "import sys; sys.version_info = tuple(map(int, '${VERSION:-3.10.0}'.split('.')))
$2" ;;
  -m)
    [[ $2 == venv ]] && mkdir -p "$4/bin"
    fails "$2"
    case $2 in
      venv)
        rm -f "$4"/.installed-*
        cp "$0" "$4/bin/python"
        printf '#!/usr/bin/env bash\nenv >&2\nprintf "%%s\\n" "$PWD" "$@"\n' >"$4/bin/ascend-kv"
        chmod +x "$4/bin/ascend-kv" ;;
      pip) [[ $* == *+cpu* ]] && fails cpu; [[ $* == *" -e "* ]] && fails install ;;
      pytest) echo "1 passed in 0.01s" ;;
    esac ;;
esac
exit 0
"""


class Checkout:
    """A copy of the scripts in an empty checkout, and the stand-in to run them with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a checkout"  # with a space: paths must be quoted
        for name in COPIED:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        self.python = folder / "python3"
        real = shutil.which("python3")
        assert real
        self.python.write_text(STAND_IN.replace("REAL", real))
        self.python.chmod(0o755)
        self.calls_file = folder / "calls"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Run a script from another directory, with these variables only."""
        self.calls_file.write_text("")
        environment = {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            **variables,
        }
        return subprocess.run(
            ["bash", str(self.folder / script), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.elsewhere,
            stdin=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> list[str]:
        """How Python was called in the last run."""
        return self.calls_file.read_text().splitlines()

    @property
    def installs(self) -> list[str]:
        """What pip was asked to install in the last run."""
        start = "-m pip install --disable-pip-version-check "
        return [call.removeprefix(start) for call in self.calls if call.startswith(start)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_sound_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", [RECIPE, TESTS])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_how_to_call_it_and_does_nothing(
    script: str, flag: str, checkout: Checkout
) -> None:
    done = checkout.run(script, flag)
    assert done.returncode == 0
    assert f"bash {script} [arguments for" in done.stdout
    assert "TORCH_INDEX_URL" in done.stdout and "#" not in done.stdout.splitlines()[0]
    assert checkout.calls == []


def test_recipe_sets_up_then_runs_the_bench_where_the_user_is(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, "--text", "my file.txt")
    assert done.returncode == 0, done.stderr
    recipe = checkout.folder / "recipes/qwen_910b.yaml"
    assert done.stdout.splitlines() == [
        *(str(checkout.elsewhere), "bench", str(recipe), "--text", "my file.txt")
    ]
    for step in ("[1/4]", "[2/4]", "[3/4]", "[4/4]", "is ready"):
        assert step in done.stderr


def test_torch_is_installed_before_what_depends_on_it(checkout: Checkout) -> None:
    checkout.run(RECIPE)
    tools, torch, what_torch_needs, package = checkout.installs
    assert tools.endswith("pip setuptools ninja")
    assert "--no-deps" in torch and torch.endswith("torch==2.13.0+cpu")
    constraints = checkout.folder / "tools/constraints.txt"
    # without it torch cannot be imported, and the native operators would not be built
    assert what_torch_needs == f"-c {constraints} torch"
    assert package == f"--no-build-isolation -c {constraints} -e ."


def test_second_run_calls_neither_pip_nor_venv(checkout: Checkout) -> None:
    checkout.run(RECIPE)
    done = checkout.run(RECIPE)
    assert done.returncode == 0 and "is ready" in done.stderr
    assert checkout.calls == []


def test_environment_of_the_tests_serves_the_tests_again(checkout: Checkout) -> None:
    checkout.run(TESTS)
    assert checkout.installs[-1].endswith(" -e .[dev]")
    checkout.run(TESTS, "-k", "store")
    pytest_call = "-m pytest -n auto --dist loadfile --no-loadscope-reorder -k store"
    assert checkout.calls == ["-m ruff check .", "-m mypy", pytest_call]


def test_environment_of_the_tests_serves_a_recipe(checkout: Checkout) -> None:
    checkout.run(TESTS)
    assert checkout.run(RECIPE).returncode == 0 and checkout.calls == []


def test_what_another_installation_built_over_is_installed_anew(checkout: Checkout) -> None:
    """The operators lie in the checkout, one library whatever is installed beside it."""
    checkout.run(RECIPE)
    checkout.run(TESTS, CXX="some-compiler")
    checkout.run(RECIPE)
    assert checkout.installs[-1].endswith(" -e .")


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_changed_requirements_are_installed_into_the_same_environment(
    name: str, checkout: Checkout
) -> None:
    checkout.run(RECIPE)
    with open(checkout.folder / name, "a") as file:
        file.write("# changed\n")
    checkout.run(RECIPE)
    assert len(checkout.installs) == 4
    assert not any("venv" in call for call in checkout.calls)
    checkout.run(RECIPE)
    assert checkout.calls == []


def test_moved_checkout_is_installed_anew(checkout: Checkout) -> None:
    checkout.run(RECIPE)
    checkout.folder = checkout.folder.rename(checkout.folder.parent / "moved")
    checkout.run(RECIPE)
    assert len(checkout.installs) == 4


def test_interrupted_installation_is_taken_up_again(checkout: Checkout) -> None:
    assert checkout.run(RECIPE, FAIL="install").returncode == 1
    done = checkout.run(RECIPE)
    assert done.returncode == 0 and checkout.installs[-1].endswith(" -e .")


def test_named_index_is_the_only_one_asked_for_torch(checkout: Checkout) -> None:
    checkout.run(RECIPE)
    checkout.run(RECIPE, TORCH_INDEX_URL="https://wheels.example/cpu")
    assert [call for call in checkout.installs if "torch==" in call] == [
        "--no-deps --index-url https://wheels.example/cpu torch==2.13.0"
    ]


@pytest.mark.parametrize("variable", ["ASCEND_KV_CPU_LEVEL=avx2", "CXX=some-compiler"])
def test_what_decides_the_build_makes_the_environment_anew(
    checkout: Checkout, variable: str
) -> None:
    name, value = variable.split("=")
    checkout.run(RECIPE)
    checkout.run(RECIPE, **{name: value})
    assert checkout.installs[-1].endswith(" -e .")
    checkout.run(RECIPE, **{name: value})
    assert checkout.installs == []


def test_every_feature_that_is_compiled_for_is_looked_at() -> None:
    pattern = re.search(r"grep -owE '([^']*)'", (ROOT / "tools/setup_env.sh").read_text())
    assert pattern
    features = {name for level in CPU_LEVELS.values() for name in level}
    assert {"amx_int8", "f16c"} < features
    assert [name for name in sorted(features) if not re.fullmatch(pattern[1], name)] == []


def test_without_the_cpu_build_the_ordinary_one_is_taken_and_said(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, FAIL="cpu")
    assert done.returncode == 0
    assert "CUDA" in done.stderr and "TORCH_INDEX_URL" in done.stderr
    assert checkout.installs[2] == "--no-deps torch==2.13.0"


def test_torch_that_cannot_be_installed_ends_the_run(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, FAIL="pip")
    assert done.returncode == 1 and done.stdout == ""
    assert checkout.run(RECIPE).returncode == 0


@pytest.mark.parametrize("version", ["2.7.18", "3.8.18", "3.9.19"])
@pytest.mark.parametrize("script", [RECIPE, TESTS])
def test_too_old_a_python_is_refused(script: str, version: str, checkout: Checkout) -> None:
    done = checkout.run(script, VERSION=version)
    assert done.returncode == 2
    assert f"Python {version}" in done.stderr and "3.10 or newer" in done.stderr
    assert "PYTHON=" in done.stderr and "Traceback" not in done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_missing_python_is_refused_by_name(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, PYTHON="python-of-nowhere")
    assert done.returncode == 2 and "python-of-nowhere" in done.stderr


def test_python_without_venv_says_what_to_install(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, FAIL="venv")
    assert done.returncode == 2 and "python3-venv" in done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_another_python_makes_the_environment_anew(checkout: Checkout) -> None:
    checkout.run(RECIPE, VERSION="3.10.4")
    checkout.run(RECIPE, VERSION="3.12.1")
    assert checkout.installs == [], "python3 changed, and nobody asked for it by name"
    checkout.run(RECIPE, VERSION="3.10.9", PYTHON="python3")
    assert checkout.installs == [], "the same Python, another patch of it"
    checkout.run(RECIPE, VERSION="3.12.1", PYTHON="python3")
    assert len(checkout.installs) == 4 and any("venv --clear" in call for call in checkout.calls)


def test_environment_lies_where_the_user_says(checkout: Checkout) -> None:
    assert checkout.run(RECIPE, VENV="here").returncode == 0
    assert (checkout.elsewhere / "here/bin/ascend-kv").is_file()
    assert not (checkout.folder / ".venv").exists()


def test_environment_of_somebody_else_is_left_alone(checkout: Checkout) -> None:
    foreign = checkout.elsewhere / "foreign"
    (foreign / "bin").mkdir(parents=True)
    shutil.copy(checkout.python, foreign / "bin/python")
    done = checkout.run(RECIPE, VENV=str(foreign))
    assert done.returncode == 2 and "not made by this script" in done.stderr
    assert checkout.calls == []


def test_torch_npu_is_installed_only_with_cann(checkout: Checkout) -> None:
    done = checkout.run(RECIPE, ASCEND_HOME_PATH=str(checkout.elsewhere))
    assert checkout.installs[-1].endswith(" -e .[npu]")
    assert any(" torch_npu" in install for install in checkout.installs[:-1])  # to build with
    assert "AUTOLOAD" not in done.stderr
    checkout.run(TESTS, ASCEND_HOME_PATH=str(checkout.elsewhere))
    assert checkout.installs[-1].endswith(" -e .[dev,npu]")
    done = checkout.run(RECIPE, ASCEND_HOME_PATH="/no/such/place")
    assert checkout.installs[-1].endswith(" -e .")
    assert "ASCEND_HOME_PATH=/no/such/place is no folder" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr


@pytest.mark.parametrize("tool", ["ruff", "mypy", "pytest"])
def test_every_check_runs_and_one_failing_fails_the_whole(tool: str, checkout: Checkout) -> None:
    done = checkout.run(TESTS, FAIL=tool)
    assert done.returncode == 1 and f"failed: {tool}" in done.stderr
    assert [call.split()[1] for call in checkout.calls[-3:]] == ["ruff", "mypy", "pytest"]


def test_ci_runs_the_tests_and_prints_their_closing_line(checkout: Checkout) -> None:
    done = checkout.run(CI, CI="true")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "1 passed in 0.01s"
    assert checkout.run(CI, FAIL="pytest").returncode == 1
