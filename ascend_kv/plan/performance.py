"""How long a step takes: a roofline of what it moves and multiplies, and what comes on top.

    step = layers * layer_seconds + tokens * token_seconds
         + max(bytes / (bandwidth * memory_efficiency),
               operations / (cube rate * cube_efficiency),
               numbers dequantized / vector rate)
         + collectives

``layer_seconds`` is what launching and the host cost for each layer whatever the batch is;
``token_seconds`` what every decoded token costs beside its bytes: scheduling, sampling, operators
that run once a sequence. The roofline comes from documents, the four parameters from published
measurements (``fitting``) or from this machine.

The form is an argument, not a discovery: of the published steps the roofline explains 6 to 60 %,
what is left is a straight line in the batch, and a line needs two rows where a richer form would
need more than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ascend_kv.plan.hardware import Hardware
from ascend_kv.plan.parameters import Parameters
from ascend_kv.plan.weight_formats import WeightFormat

VECTOR_PASSES = 4
"""Passes of the vector cores over each number that is dequantized, in 16 bit: two casts, a product
and a store. Assumed; the term is below the memory's in all shapes tried."""

COLLECTIVE_SECONDS = 4e-6
"""Fixed cost of one all-reduce among the cards of a host: what is left of the two-card rows of
Qwen3-8B (``published``) once the one-card rows are fitted, over 72 of them a step; rounded."""


class Costs(NamedTuple):
    """The parameters of the model.

    Attributes:
        layer_seconds: of each layer in each step, whatever it holds.
        token_seconds: of each decoded token.
        memory_efficiency: share of the published bandwidth that is reached.
        cube_efficiency: share of the matrix rate that is reached.
    """

    layer_seconds: float
    token_seconds: float
    memory_efficiency: float
    cube_efficiency: float


PEAK = Costs(0.0, 0.0, 1.0, 1.0)
"""Nothing lost: the roofline itself."""


class Load(NamedTuple):
    """What one step does on one copy of the model.

    Attributes:
        decodes: sequences that bring one token.
        decode_context: tokens they attend to, summed.
        prefill_tokens: tokens of prompts.
        prefill_pairs: pairs of a prompt's token and one it attends to, summed.
        prefill_context: tokens that the chunks' last tokens attend to, summed: what is read once
            for each chunk.
    """

    decodes: int
    decode_context: int
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefill_context: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill_tokens

    @property
    def context(self) -> int:
        """Tokens whose keys and values are read, the step's own included."""
        return self.decode_context + self.prefill_context


def load_of(chunks: Iterable[tuple[int, int]]) -> Load:
    """What a step does.

    Args:
        chunks: of each sequence the tokens before and after the step. A chunk of one token counts
            as a decode, as in the engine's own batch.
    """
    decodes = context = tokens = pairs = prefill_context = 0
    for start, stop in chunks:
        if stop - start == 1:
            decodes += 1
            context += stop
        else:
            tokens += stop - start
            pairs += (stop * (stop + 1) - start * (start + 1)) // 2
            prefill_context += stop
    return Load(decodes, context, tokens, pairs, prefill_context)


class ServedModel(NamedTuple):
    """What of a model and its cache one card of a copy works on.

    Attributes:
        layers: of the model.
        parameters, weights: stored weights and their format.
        tensor: cards of a copy.
        attention_width: query heads on this card x head_dim, for attention's own operations.
        hidden_size: what an all-reduce carries for each token.
        kv_token_bytes: one token's keys and values on this card, in all layers.
        kv_numbers: the same in numbers, where they have to be dequantized; else 0.
        copied_bytes: of one token in 16 bit, in the layers whose cache is written out for every
            decode, since attention does not read it as it lies.
        loaded_bytes: the same where it is written out for prompts.
    """

    layers: int
    parameters: Parameters
    weights: WeightFormat
    tensor: int
    attention_width: int
    hidden_size: int
    kv_token_bytes: int
    kv_numbers: int
    copied_bytes: int = 0
    loaded_bytes: int = 0

    def weight_bytes_read(self, tokens: float) -> float:
        """Bytes of weights that a step of so many tokens reads on this card."""
        parameters, weights = self.parameters, self.weights
        experts = parameters.reached_experts(tokens) * weights.expert_bytes
        linear = parameters.linear_bytes(weights) + experts
        return (linear + parameters.output * weights.other_bytes) / self.tensor

    def moved_bytes(self, load: Load) -> float:
        """Weights, the cache that is attended to, and the keys and values that are stored.

        A prompt's chunk reads the cache once for all its tokens. What is copied is written and
        read once more.
        """
        tokens = load.context + load.tokens
        copied = load.decode_context * self.copied_bytes + load.prefill_context * self.loaded_bytes
        return self.weight_bytes_read(load.tokens) + tokens * self.kv_token_bytes + 2 * copied

    def operations(self, load: Load) -> float:
        """Multiplications and additions of the matrices and of attention."""
        parameters = self.parameters
        # Of a prompt the output matrix multiplies the last token only: left out.
        inner = parameters.active - parameters.output
        matrices = 2 * (inner * load.tokens + parameters.output * load.decodes)
        pairs = load.decode_context + load.prefill_pairs
        return matrices / self.tensor + 4.0 * self.layers * self.attention_width * pairs


class StepTime(NamedTuple):
    """A step's time, and where it goes.

    Attributes:
        seconds: together.
        parts: seconds by name: "layers", "tokens", "memory", "cube", "vector", "collectives". Of
            memory, cube and vector only the largest counts.
        bound: the name of what most of it is due to.
    """

    seconds: float
    parts: dict[str, float]
    bound: str


def step_time(model: ServedModel, load: Load, hardware: Hardware, costs: Costs) -> StepTime:
    """The time of one step.

    Args:
        model, load: one card's share.
        hardware: with a published bandwidth and matrix rate.
        costs: the parameters.
    """
    assert hardware.hbm_bytes_per_second and hardware.cube_flops, "has_rates() comes first"
    rate = hardware.cube_flops * (2 if model.weights.eight_bits else 1)
    vector = 0.0
    if model.kv_numbers and hardware.vector_bytes_per_second:
        numbers = model.kv_numbers * (load.context + load.tokens)
        vector = 2 * VECTOR_PASSES * numbers / hardware.vector_bytes_per_second
    collectives = 0.0
    if model.tensor > 1:
        carried = 2 * load.tokens * model.hidden_size * 2 * (model.tensor - 1) / model.tensor
        each = COLLECTIVE_SECONDS + carried / hardware.link_bytes_per_second
        collectives = 2 * model.layers * each
    parts = {
        "layers": model.layers * costs.layer_seconds,
        "tokens": load.decodes * costs.token_seconds,
        "memory": model.moved_bytes(load)
        / (hardware.hbm_bytes_per_second * costs.memory_efficiency),
        "cube": model.operations(load) / (rate * costs.cube_efficiency),
        "vector": vector,
        "collectives": collectives,
    }
    roofline = max(parts["memory"], parts["cube"], parts["vector"])
    seconds = parts["layers"] + parts["tokens"] + roofline + collectives
    return StepTime(seconds, parts, max(parts, key=parts.__getitem__))


Clock = Callable[[Load], StepTime]
"""The time of a step that does so much."""


def has_rates(hardware: Hardware) -> bool:
    """Whether a step's time can be predicted for a card at all."""
    return hardware.hbm_bytes_per_second is not None and hardware.cube_flops is not None


def roofline_clock(model: ServedModel, hardware: Hardware, costs: Costs) -> Clock:
    """``step_time`` of one model on one card."""
    return lambda load: step_time(model, load, hardware, costs)


class Latency(NamedTuple):
    """What a user of a deployment sees, predicted.

    Attributes:
        ttft_seconds: until the first token of a prompt that comes alone.
        tpot_seconds: between two tokens, while ``batch`` sequences decode.
        tokens_per_second: of all copies together, decoding.
        bound: what most of a decode step is due to.
    """

    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float
    bound: str


def latency(
    clock: Clock,
    *,
    batch: int,
    prompt_tokens: int,
    context_tokens: float,
    max_num_batched_tokens: int,
    copies: int = 1,
) -> Latency:
    """TTFT, TPOT and throughput at one batch.

    Args:
        clock: of one copy of the model.
        batch: sequences that decode at once in each copy.
        prompt_tokens: length of a prompt.
        context_tokens: what a decoding sequence attends to, on the average.
        max_num_batched_tokens: longest chunk of a prompt.
        copies: of the model.
    """
    ttft, done = 0.0, 0
    while done < prompt_tokens:
        chunk = min(max_num_batched_tokens, prompt_tokens - done)
        ttft += clock(load_of([(done, done + chunk)])).seconds
        done += chunk
    step = clock(Load(batch, round(batch * context_tokens)))
    return Latency(ttft, step.seconds, copies * batch / step.seconds, step.bound)
