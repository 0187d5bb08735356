"""What a lint looks at, and what it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ascend_kv.devices import Device
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.recipe import BenchRecipe, SchemeRecipe
from ascend_kv.evaluate.schemes import make_budget, plan_scheme
from ascend_kv.geometry import ModelGeometry, layer_format
from ascend_kv.model_files import is_hub_id, load_geometry
from ascend_kv.plan.capacity import Capacity

Severity = Literal["error", "warning", "note"]


class Lint(NamedTuple):
    """One finding. An error will fail or give wrong results, a warning costs, a note informs."""

    severity: Severity
    key: str
    found: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Case:
    """What is looked at.

    Attributes:
        recipe: with real formats.
        device: it is to run on.
        geometry: of the model; None where it is not at hand.
        model: its directory or file; None as above.
        model_dtype: what it computes in.
    """

    recipe: BenchRecipe
    device: Device
    geometry: ModelGeometry | None
    model: Path | None
    model_dtype: str

    @property
    def block_size(self) -> int:
        return self.recipe.block_size or self.device.default_block_size

    @property
    def on_npu(self) -> bool:
        return self.device.name != "cpu"

    @property
    def quantized(self) -> list[tuple[str, str]]:
        """The recipe's quantized formats, after the keys that ask for them."""
        return [x for x in self.recipe.formats() if x[1] != "auto" and layer_format(x[1]).quantized]

    @property
    def mean_tokens(self) -> float:
        """Of a running sequence, on the average."""
        work = self.recipe.workload
        return work.prompt_tokens.mean + work.output_tokens.mean / 2

    def capacity_of(self, scheme: SchemeRecipe) -> Capacity:
        """What the planner says; needs the geometry.

        Raises:
            UsageError: as ``plan_scheme``.
        """
        assert self.geometry is not None
        work = self.recipe.workload
        _, plan = plan_scheme(
            self.recipe,
            scheme,
            self.geometry,
            self.model_dtype,
            make_budget(self.recipe, self.geometry, self.block_size),
            [(round(work.prompt_tokens.mean), round(work.output_tokens.mean))],
            work.requests,
        )
        return plan


def refused(key: str, error: UsageError, reason: str) -> Lint:
    """The error that a ``UsageError`` is for a recipe."""
    found = str(error.given) if error.field == key else f"{error.field}: {error.given}"
    return Lint("error", key, found, reason, f"legal: {error.legal}. {error.hint}".strip())


def find_geometry(named: str | None, found: list[Lint]) -> tuple[Path | None, ModelGeometry | None]:
    """A model's directory or file, and its geometry; None for what is not on this machine.

    Args:
        named: directory, file or hub id; nothing is fetched.
        found: gets a finding where one of them is None.
    """
    path = Path(named).expanduser() if named else None
    if path is None or not path.exists():
        if named is not None and not is_hub_id(named):
            reason = "There is no such file or directory."
            found.append(
                Lint("error", "model", named, reason, "A directory, a .gguf file or a hub id.")
            )
            return None, None
        what = "no model is named" if named is None else f"{named} is not on this machine"
        reason = "What depends on the model was not looked at."
        found.append(Lint("note", "model", what, reason, "--model DIRECTORY or FILE.gguf"))
        return None, None
    try:
        return path, load_geometry(path)
    except UsageError as error:
        found.append(refused("model", error, "It cannot be served."))
        return path, None


def worst_first(found: Iterable[Lint]) -> list[Lint]:
    """Every finding once, errors before warnings before notes."""
    order = get_args(Severity)
    return sorted(dict.fromkeys(found), key=lambda lint: order.index(lint.severity))
