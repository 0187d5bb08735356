"""Other engines beside ours in one run: environments of their own, subprocesses, turns.

What is measured is the marginal cost of context: how much longer a token takes for each token
of context more. Kernels of weights, sampling and bookkeeping take as long with any context, so
they cancel out; what is left is attention over the cache. ``tools/bench_peers.py`` names the
engines, ``tools/peers/protocol.py`` what is said to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ascend_kv.errors import RunError

_MARK = ".installed-by-ascend_kv"
_SECONDS_TO_END = 10

Say = Callable[[str], None]


class Peer(NamedTuple):
    """An engine, in an environment of its own."""

    name: str
    script: Path
    """Serves the protocol."""
    variants: tuple[str, ...]
    """Ways to store keys and values."""
    installs: tuple[tuple[str, ...], ...] = ()
    """Requirements for pip, call after call; none: this Python serves."""

    def python(self, folder: Path) -> Path:
        """The Python of the engine's environment in ``folder``."""
        return folder / self.name / "bin" / "python" if self.installs else Path(sys.executable)

    def why_absent(self, folder: Path) -> str | None:
        """Why the engine cannot be started; None: it can."""
        mark = folder / self.name / _MARK
        if not self.installs or (mark.is_file() and mark.read_text() == self._wanted()):
            return None
        what = "in other versions" if mark.is_file() else "not"
        return f"{what} installed in {folder}: --install {self.name}"

    def install(self, folder: Path, constraints: Path) -> None:
        """Make the environment anew.

        Args:
            folder: where the environments are.
            constraints: versions of what the requirements do not pin.

        Raises:
            RunError: venv or pip failed; what they said went to standard error.
        """
        environment = folder / self.name
        commands = [[sys.executable, "-m", "venv", "--clear", str(environment)]]
        pip = [str(self.python(folder)), "-m", "pip", "install", "--disable-pip-version-check"]
        commands += [[*pip, "-c", str(constraints), *packages] for packages in self.installs]
        for command in commands:
            # Standard output is kept for results.
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise RunError(f"{self.name} is not installed: {' '.join(command)} failed")
        (environment / _MARK).write_text(self._wanted())

    def _wanted(self) -> str:
        return json.dumps(self.installs)


class PeerError(RunError):
    """An engine refused, failed or ended; the message says how."""


class Worker:
    """An engine's process."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        """Start it.

        Raises:
            PeerError: there is nothing to start.
        """
        # As an activated environment does: what an engine compiles when first used needs its tools.
        path = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)))
        # A file, not a pipe: nobody reads a pipe while the engine fills it.
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "PATH": path},
            )
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, wait for the answer.

        Raises:
            PeerError: the engine could not, or its process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"ended with exit code {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(" ".join(str(answer["error"]).split()))
        return answer

    def close(self) -> None:
        """End the process: politely, then not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints if line.strip()]
        return lines[-1] if lines else "it said nothing"


class Plan(NamedTuple):
    """What is run, the same for every engine."""

    model: Path
    """A GGUF file."""
    contexts: tuple[int, int]
    """Tokens in the cache when measuring begins: few, many."""
    turns: int
    steps: int
    """Tokens that are decoded in a turn, at each context."""
    threads: int

    @property
    def most_tokens(self) -> int:
        """The longest a sequence gets: after all turns, the one that warms up among them."""
        return self.contexts[1] + (self.turns + 1) * self.steps + 1


@dataclass
class Outcome:
    """What became of one engine with one kind of cache."""

    peer: str
    variant: str
    skipped: str | None = None
    """Why there are no figures."""
    loaded: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    step_seconds: dict[int, list[float]] = field(default_factory=dict)
    """By context, the median step of each turn."""

    def marginal_seconds(self) -> list[float]:
        """What a token of context more adds to a step, by turn: neighbours in time compared."""
        (few, short), (many, long) = sorted(self.step_seconds.items())
        return [(b - a) / (many - few) for a, b in zip(short, long, strict=True)]


def compare(
    entries: Sequence[tuple[Peer, str]], folder: Path, plan: Plan, say: Say
) -> list[Outcome]:
    """Measure engines in turns, so that whatever else the machine does hits all of them.

    All are loaded and hold their caches before the first turn. The first turn warms up.

    Args:
        entries: engines with one of their variants each.
        folder: where the environments are.
        plan: what is run.
        say: told what is going on.
    """
    outcomes: list[Outcome] = []
    running: list[tuple[Worker, Outcome]] = []
    with ExitStack() as stack:
        for peer, variant in entries:
            outcome = Outcome(peer.name, variant, peer.why_absent(folder))
            outcomes.append(outcome)
            if outcome.skipped is None:
                say(f"{peer.name}, {variant}: loading, prefilling")
                with _failure_noted(outcome):
                    worker = Worker([str(peer.python(folder)), str(peer.script)], plan.threads)
                    stack.callback(worker.close)
                    _prepare(worker, outcome, plan)
                    running.append((worker, outcome))
        for turn in range(plan.turns + 1):
            say(f"turn {turn} of {plan.turns}" if turn else "warming up")
            for worker, outcome in running:
                if outcome.skipped is None:
                    with _failure_noted(outcome):
                        _take_turn(worker, outcome, turn, plan)
    return outcomes


@contextmanager
def _failure_noted(outcome: Outcome) -> Iterator[None]:
    """What one engine cannot does not stop the others."""
    try:
        yield
    except PeerError as error:
        outcome.skipped = str(error)


def _prepare(worker: Worker, outcome: Outcome, plan: Plan) -> None:
    answer = worker.ask(
        do="load",
        model=str(plan.model),
        variant=outcome.variant,
        threads=plan.threads,
        most_tokens=plan.most_tokens,
    )
    outcome.loaded, outcome.versions = answer["loaded"], answer["versions"]
    for context in plan.contexts:
        worker.ask(do="prefill", tokens=context)
        outcome.step_seconds[context] = []


def _take_turn(worker: Worker, outcome: Outcome, turn: int, plan: Plan) -> None:
    # What drifts within a turn then hits either context as often first.
    for context in plan.contexts if turn % 2 else plan.contexts[::-1]:
        seconds = worker.ask(do="decode", tokens=context, steps=plan.steps)["seconds"]
        if turn:
            outcome.step_seconds[context].append(median(seconds))
