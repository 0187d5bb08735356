"""What the main job finds, as plain records; ``report.json`` is these records written down.

Measured and predicted figures never share a record: ``Predicted`` is what the planner said from
the geometry before anything ran, ``Measured`` what this run did.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ascend_kv.evaluate.machine import Machine
from ascend_kv.evaluate.workload import WorkloadSummary

SCHEMA = "ascend_kv.bench/1"
"""Name and version of the layout of ``report.json``; a key that changes its meaning raises it."""


@dataclass(frozen=True)
class Predicted:
    """A scheme before it runs, from geometry and lengths alone."""

    max_num_seqs: int
    """The batch limit the scheme was given."""
    token_bytes: int
    num_blocks: int
    kv_bytes: int
    sequences_full_length: float
    """Sequences at once when each is ``max_model_len`` long."""
    sequences_mean: float
    """Sequences at once when each is as long as the requests' mean final length."""
    sequences_live: float
    """Sequences at once at the length a request has on the average while it runs."""
    tokens_per_second: float | None = None
    """From steps measured before the schemes ran, and the scheduler simulated: at the speed that
    the machine had then."""


@dataclass(frozen=True)
class Timeline:
    """A scheme's run in at most a few hundred moments, for plots; lists of equal length."""

    seconds: list[float]
    running: list[int]
    utilisation: list[float]


@dataclass(frozen=True)
class Measured:
    """A scheme as it ran."""

    wall_seconds: float
    generated_tokens: int
    tokens_per_second: float
    steps: int
    model_seconds: float
    """Time in the model's forward, operators included."""
    engine_step_seconds: float
    """Mean time of a step outside the model's forward."""
    batch_mean: float
    """Sequences running, averaged over time."""
    batch_mean_busy: float
    """The same while other requests waited: without the run's end, when few are left."""
    batch_peak: int
    kv_allocated_bytes: int
    """Bytes of the cache's tensors."""
    kv_geometry_bytes: int
    """Bytes that geometry gives for as many blocks; must be the same."""
    kv_token_bytes_mean: float
    """Bytes that held a token, averaged over time."""
    kv_held_bytes_mean: float
    """Bytes of the blocks that a sequence held, averaged over time."""
    utilisation: float
    """Share of the held token slots that held a token, averaged over time."""
    preemptions: int
    recomputed_tokens: int
    key_conditioning: str
    """What was done to the model's keys before they were stored."""
    speed_probes: int
    """How often the machine's speed was probed between steps; not part of the times above."""
    speed_probe_seconds: float
    """Of such a probe, the median."""
    timeline: Timeline


@dataclass(frozen=True)
class CalibrationRun:
    """The steps from which speed is predicted were timed."""

    wall_seconds: float
    speed_probes: int
    speed_probe_seconds: float
    """Of a probe meanwhile, the median: the machine's speed that predictions are made at."""


@dataclass(frozen=True)
class SpeedCheck:
    """A scheme's predicted tokens/s against those measured, errors as shares of the measured."""

    error: float
    """As they are, whatever happened to the machine between calibration and scheme."""
    machine_speed: float
    """Of the machine while the scheme ran over that at calibration, by a probe that knows neither
    model nor cache: 0.8 is slower by a fifth."""
    error_at_equal_speed: float
    """Of the prediction times ``machine_speed``."""


def check_speed(
    predicted: Predicted, measured: Measured, calibration: CalibrationRun
) -> SpeedCheck:
    """How near a prediction came, which there must be."""
    assert predicted.tokens_per_second is not None, "predicted from the calibration"
    ratio = predicted.tokens_per_second / measured.tokens_per_second
    speed = calibration.speed_probe_seconds / measured.speed_probe_seconds
    return SpeedCheck(ratio - 1, speed, ratio * speed - 1)


@dataclass(frozen=True)
class SchemeResult:
    """One scheme: what it is, what was predicted, what was measured, and how far they differ."""

    name: str
    allocator: str
    kv_cache_dtype: str
    batch: str
    predicted: Predicted
    measured: Measured
    speed_check: SpeedCheck
    ratio_to_first: float
    """Tokens per second over those of the first scheme."""


@dataclass(frozen=True)
class Factor:
    """How much faster one scheme is than another, and what that isolates."""

    name: str
    scheme: str
    baseline: str
    ratio: float


@dataclass(frozen=True)
class FormatPerplexity:
    """One cache format against the unquantized reference on the same tokens."""

    kv_cache_dtype: str
    perplexity: float
    ratio: float
    """Perplexity over the reference's; 1 for the reference itself."""
    ratio_low: float
    ratio_high: float
    """Ends of the 95 % confidence interval of the ratio."""
    key_conditioning: str
    """What was done to the model's keys before they were stored."""
    wall_seconds: float


@dataclass(frozen=True)
class Perplexity:
    """Perplexity by format, the reference first."""

    method: str
    windows: int
    window_tokens: int
    scored_tokens: int
    clusters: int
    prefill_reads: str
    formats: list[FormatPerplexity]


@dataclass(frozen=True)
class PlantedRow:
    """One cache on a small random model with a large key bias, against its unquantized cache."""

    name: str
    perplexity: float
    perplexity_ratio: float
    """Over the unquantized cache's; 1 for that one itself."""
    logit_error: float
    """Root mean square of the difference from the unquantized logits, over their deviation."""
    same_choices: float
    """Share of positions at which the most likely token is the unquantized one's."""
    key_conditioning: str


@dataclass(frozen=True)
class Sample:
    """One prompt continued greedily with two caches."""

    prompt: str
    reference_dtype: str
    reference_text: str
    quantized_dtype: str
    quantized_text: str
    tokens: int
    equal_tokens: int
    """Tokens before the first difference."""


@dataclass(frozen=True)
class SweepPoint:
    """Decoding alone at one batch size."""

    batch: int
    tokens_per_second: float
    step_seconds: float


@dataclass(frozen=True)
class Sweep:
    """Decode throughput against batch, for one format."""

    kv_cache_dtype: str
    context_tokens: int
    points: list[SweepPoint]


@dataclass(frozen=True)
class AttentionRoute:
    """One way that ``paged_attention`` went on an NPU in one part of the run."""

    part: str
    """A scheme's name, or that of another part."""
    route: str
    """``decode: paged``, ``decode: loaded (rule)``, ``prefill: reference (rule)`` and the like."""
    calls: int
    reason: str
    """The rules of the device that the first of the calls broke; empty where paged."""


@dataclass(frozen=True)
class ModelInfo:
    """The model that ran."""

    name: str
    dtype: str
    """Type the weights are computed in."""
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TextInfo:
    """The text prompts were cut from and perplexity was measured on."""

    source: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Budget:
    """The KV memory that every scheme gets, and how it came about."""

    bytes: int
    sequences: int
    max_model_len: int
    kv_cache_dtype: str
    block_size: int


@dataclass
class BenchResult:
    """Everything; filled in as the job goes on and written after every part."""

    started: str
    """ISO 8601, UTC."""
    quick: bool
    machine: Machine
    operators: dict[str, str]
    """Which implementation serves each operator on this device, called or not."""
    model: ModelInfo
    text: TextInfo
    budget: Budget
    workload: WorkloadSummary
    recipe: dict[str, Any]
    """The recipe as it ran."""
    calibration: CalibrationRun | None = None
    schemes: list[SchemeResult] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    perplexity: Perplexity | None = None
    planted_bias: list[PlantedRow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sweep: Sweep | None = None
    attention_routes: list[AttentionRoute] = field(default_factory=list)
    """How the NPU's fused attention was used; empty on a CPU, which has none."""
    wall_seconds: float = 0.0
    complete: bool = False
    """False while parts are missing: the job is running or has broken off."""

    def as_json(self) -> dict[str, Any]:
        """The content of ``report.json``."""
        content = asdict(self)
        content["machine"] = self.machine._asdict()
        content["workload"] = self.workload._asdict()
        return {"schema": SCHEMA} | content
