"""Every model family, run by the engine over paged memory, is transformers' own model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grader.judge.numerics import check_close, check_equal
from labkit.checkpoints import CheckpointError, bundled_folder, load_tokenizer
from labkit.drafting import DraftTree
from labkit.tokenizer import Tokenizer
from solutions.engine import Engine, EngineConfig, SamplingParams
from solutions.engine.kv_manager import KVManager
from solutions.engine.memory.features import FeaturePool
from solutions.engine.memory.kv_pool import KVPool
from solutions.engine.model_runner import ModelRunner
from solutions.engine.models import loading
from solutions.engine.models.blocks import Decoder
from solutions.engine.models.experts import Experts
from solutions.engine.models.latent_attention import LatentAttention
from solutions.engine.models.loading import LoadedModel, load_decoder
from solutions.engine.models.yarn import Yarn
from solutions.engine.request import FinishReason, Request
from solutions.engine.scheduler import Scheduler, SchedulerConfig
from solutions.engine.step import Step, Work
from tests.engine.families import FAMILIES, NUM_LAYERS, VOCAB_SIZE, WINDOW, oracle_of

BLOCK_SIZE = 4
WINDOWED = ["mistral", "mixtral, windows"]
LATENT = ["deepseek v2", "deepseek v2, groups", "deepseek v3"]
LAYERS = (0, 2, NUM_LAYERS)
"""Hidden states that a drafter could ask for: the embeddings, one in between, and what the head reads."""


@dataclass(frozen=True)
class Family:
    """A model twice: transformers' and, from the folder that it was stored in, the engine's."""

    oracle: Any
    folder: Path
    model: Decoder

    def logits(self, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """transformers' logits after each token, `[tokens, vocab_size]`."""
        with torch.no_grad():
            result: Tensor = self.oracle.to(dtype)(torch.tensor([tokens])).logits[0]
        self.oracle.to(torch.float32)
        return result


GetFamily = Callable[[str], Family]


@pytest.fixture(scope="session")
def get_family(tmp_path_factory: pytest.TempPathFactory) -> GetFamily:
    """Families by name, made when they are first asked for."""
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            oracle, folder = oracle_of(name), tmp_path_factory.mktemp("family")
            oracle.save_pretrained(folder)
            made[name] = Family(oracle, folder, load_decoder(folder))
        return made[name]

    return get


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of the bundled model: all that matters here is that it can tell the text of small ids."""
    return load_tokenizer("smollm2")


def text_of(length: int, seed: int) -> tuple[int, ...]:
    """A text of random tokens."""
    return tuple(torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def poisoned_pool(model: Decoder, num_blocks: int) -> KVPool:
    """A pool in which whatever nobody wrote is NaN."""
    pool = KVPool(model.kv_shape, num_blocks, BLOCK_SIZE)
    for tensor in pool._planes[0].tensors:
        tensor.fill_(torch.nan)
    return pool


class Reading:
    """Requests whose texts are known in advance, run by the engine's scheduler; logits are kept where they appear."""

    def __init__(
        self, model: Decoder, texts: list[tuple[int, ...]], num_prompt: list[int], prefix_cache: str = "hash"
    ) -> None:
        self.memory = KVManager(64, BLOCK_SIZE, prefix_cache)
        limits = SchedulerConfig(max_running=len(texts), token_budget=24, max_context=model.max_context)
        self.scheduler = Scheduler(limits, self.memory)
        self.features = FeaturePool(LAYERS, model, 64, BLOCK_SIZE)
        self.runner = ModelRunner(model, poisoned_pool(model, 64), self.features)
        self.texts: dict[Request, tuple[int, ...]] = {}
        for text, count in zip(texts, num_prompt, strict=True):
            params = SamplingParams(max_tokens=len(text) - count)
            request = Request(str(len(self.texts)), text[:count], params, self.memory.new_table())
            self.texts[request] = text
        self.logits: dict[tuple[int, ...], dict[int, Tensor]] = {text: {} for text in texts}
        self.thoughts: dict[tuple[int, ...], Tensor] = {}
        self.shapes: set[tuple[bool, bool, bool]] = set()
        self.num_trees = 0

    def run(self) -> None:
        """A request more in each step, until all are read."""
        arriving = list(self.texts)
        while arriving or not self.scheduler.is_idle:
            if arriving:
                self.scheduler.add(arriving.pop(0))
            step = self.scheduler.schedule(self._propose)
            self._take(step, self.runner.run(step))

    def _propose(self, request: Request, room: int, depth: int) -> DraftTree:
        """Now and then two drafts that are right, one behind the other or hidden in a tree."""
        known = len(request.tokens)
        right = self.texts[request][known : known + min(depth, 2)]
        if known % 3:
            return DraftTree((), ())
        if known % 2 or len(right) < 2 or room < 5:
            return DraftTree(right[:room], tuple(range(-1, len(right[:room]) - 1)))
        self.num_trees += 1
        wrong = (right[0] + 1) % VOCAB_SIZE
        return DraftTree((wrong, right[0], right[1], wrong, right[1]), (-1, -1, 0, 1, 1))

    def _take(self, step: Step, logits: Tensor) -> None:
        sizes = [len(work.tokens) - work.num_drafts for work in step.work]
        drafts = any(work.num_drafts for work in step.work)
        self.shapes.add((any(size == 1 for size in sizes), any(size > 1 for size in sizes), drafts))
        emitted, paths, row = dict[Request, list[int]](), dict[Request, list[int]](), 0
        for work in step.work:
            if work.gives_token:
                text, known = self.texts[work.request], work.end - work.num_drafts
                path = [1, 4] if work.parents else list(range(work.num_drafts))
                for place, node in enumerate([-1, *path], start=known - 1):
                    self.logits[text][place] = logits[row + 1 + node]
                emitted[work.request], paths[work.request] = list(text[known : known + len(path) + 1]), path
            row += work.num_rows
        self.runner.keep(self.scheduler.commit(step, emitted, paths))
        for request in emitted:
            if len(request.tokens) == request.max_length:
                self.thoughts[self.texts[request]] = self.features.read(request)
                self.scheduler.finish(request, FinishReason.LENGTH)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_prompts_in_pieces_and_decodes_in_one_batch(get_family: GetFamily, name: str) -> None:
    family = get_family(name)
    texts = [text_of(length, seed) for seed, length in enumerate((9, 47, 21, 32, 14))]
    texts.append(texts[1][:33] + text_of(9, 8))  # finds a prefix in the cache
    num_prompt = [5, 38, 1, 19, 8, 36]
    reading = Reading(family.model, texts, num_prompt)
    reading.run()
    reading.memory.check_idle()
    assert {(True, True, True), (True, True, False)} <= reading.shapes, "decodes, pieces and drafts were to be mixed"
    assert reading.num_trees > 5
    got, want, plain = list[Tensor](), list[Tensor](), list[Tensor]()
    for (text, rows), count in zip(reading.logits.items(), num_prompt, strict=True):
        assert sorted(rows) == list(range(count - 1, len(text) - 1))
        got += rows.values()
        want.append(family.logits(text, torch.float64)[list(rows)])
        plain.append(family.logits(text)[list(rows)])
    reference = torch.cat(want)
    check_close(
        f"logits of {name}", torch.stack(got), reference, scale=float(reference.abs().max()), dtype=torch.float32,
        plain=torch.cat(plain),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "ministral", "deepseek v3"])
def test_what_the_model_thought_stays_beside_the_blocks(get_family: GetFamily, name: str) -> None:
    """Of prompts in pieces, a prefix that somebody else computed and that ends within a block, drafts that moved up."""
    family = get_family(name)
    texts = [text_of(47, 1), text_of(24, 2), text_of(47, 1)[:33] + text_of(9, 8)]
    reading = Reading(family.model, texts, [38, 3, 36], "radix")
    reading.run()
    assert reading.num_trees > 2 and 33 in [request.num_cached for request in reading.texts]
    for text, got in reading.thoughts.items():
        reference = thoughts(family, text, torch.float64)
        check_close(
            f"hidden states of {name}", got, reference, scale=float(reference.abs().max()), dtype=torch.float32,
            plain=thoughts(family, text, torch.float32),
        )  # fmt: skip


def thoughts(family: Family, text: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """transformers' hidden states of `LAYERS` side by side, for all tokens that are ever read."""
    with torch.no_grad():
        states = family.oracle.to(dtype)(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    family.oracle.to(torch.float32)
    return torch.cat([states[layer][0] for layer in LAYERS], -1)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_survive_swaps_and_cached_prefixes(
    get_family: GetFamily, tokenizer: Tokenizer, name: str
) -> None:
    family = get_family(name)
    limits = SchedulerConfig(max_running=4, token_budget=12, preemption="swap")
    config = EngineConfig(limits, num_blocks=14, block_size=BLOCK_SIZE, num_host_blocks=30)
    engine = Engine(LoadedModel(family.model, tokenizer), config)
    prompts = [list(text_of(length, seed)) for seed, length in enumerate((3, 13, 1, 26))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [several[0].tokens for several in engine.generate(prompts, params)]
    assert engine.metrics.num_preemptions > 0, "the pool was to be too small"
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = family.logits((*prompt, *answer))
        assert answer == tuple(logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist())
    again = engine.generate(prompts[3:], params)[0][0]
    assert (again.tokens, again.num_cached_tokens > 0) == (answers[3], True)
    engine.check_idle()


def work_of(start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> Work:
    """The tokens of a request from a place on, all their logits wanted."""
    slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, start + len(tokens))]
    own = blocks[: (start + len(tokens) - 1) // BLOCK_SIZE + 1]
    request = Request("one", tokens, SamplingParams(), KVManager(1, BLOCK_SIZE).new_table())
    return Work(request, start, tokens, len(tokens) - 1, tuple(slots), own, True)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", WINDOWED)
def test_nobody_reads_blocks_before_every_window(get_family: GetFamily, name: str, count: int) -> None:
    family, text, blocks = get_family(name), text_of(31, seed=3), tuple(range(8, 0, -1))
    pool = poisoned_pool(family.model, 10)
    runner = ModelRunner(family.model, pool)
    start = len(text) - count
    runner.run(Step((work_of(0, text[:start], blocks),)))
    unseen = blocks[: (start - WINDOW + 1) // BLOCK_SIZE]
    assert len(unseen) >= 5
    for tensor in pool._planes[0].tensors:
        tensor[list(unseen)] = torch.nan
    got = runner.run(Step((work_of(start, text[start:], blocks),)))
    reference = family.logits(text, torch.float64)[start:]
    check_close(
        "logits", got, reference, scale=float(reference.abs().max()), dtype=torch.float32,
        plain=family.logits(text)[start:],
    )  # fmt: skip


@pytest.mark.parametrize("name", LATENT)
def test_a_decode_step_makes_no_keys_from_latents(
    get_family: GetFamily, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, text, blocks = get_family(name), text_of(41, seed=4), tuple(range(11))
    runner = ModelRunner(family.model, poisoned_pool(family.model, 11))
    layer: Any = family.model._layers[0]
    assert isinstance(layer._attention, LatentAttention)
    expanded: list[int] = []
    expand = type(layer._attention._maps).expand

    def counted(maps: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
        expanded.append(len(latents))
        return expand(maps, latents)

    monkeypatch.setattr(type(layer._attention._maps), "expand", counted)
    runner.run(Step((work_of(0, text[:37], blocks),)))
    assert expanded == [37] * NUM_LAYERS, "a prompt that meets itself is cheaper with keys and values"
    runner.run(Step((work_of(37, text[37:38], blocks),)))
    runner.run(Step((work_of(38, text[38:], blocks),)))
    assert expanded == [37] * NUM_LAYERS, "a few queries are cheaper on the latents"


@pytest.mark.parametrize(("name", "numbers"), [("qwen3", 2 * 2 * 8), ("mixtral", 2 * 2 * 6), ("deepseek v3", 12 + 8)])
def test_a_token_costs_what_its_model_keeps(get_family: GetFamily, name: str, numbers: int) -> None:
    pool = KVPool(get_family(name).model.kv_shape, 5, BLOCK_SIZE)
    assert pool.num_bytes == 5 * BLOCK_SIZE * NUM_LAYERS * numbers * 4


def test_an_expert_is_called_once_with_all_its_tokens() -> None:
    calls: list[tuple[int, list[float]]] = []

    def expert(number: int) -> Callable[[Tensor], Tensor]:
        def compute(hidden: Tensor) -> Tensor:
            calls.append((number, hidden[:, 0].tolist()))
            return hidden * 10**number

        return compute

    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    chosen = torch.tensor([[2, 0], [0, 3], [3, 2]])
    shares = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 2.0]])
    out = Experts(lambda _: (chosen, shares), [expert(number) for number in range(5)], lambda x: -x)(hidden)
    assert sorted(calls) == [(0, [1.0, 3.0]), (2, [1.0, 5.0]), (3, [3.0, 5.0])]
    factors = torch.tensor([[0.25 * 100 + 0.75 - 1], [0.5 + 500 - 1], [1000 + 200 - 1]])
    check_equal("the sum of the experts", out, factors * hidden)


def entries_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json."""
    entries: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return entries


def copy_of(family: Family, folder: Path, entries: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """The family's folder with entries and weights put in place of its own; None takes one out."""
    both: list[dict[str, Any]] = [
        {**entries_of(family.folder), **entries}, {**load_file(family.folder / "model.safetensors"), **weights}
    ]  # fmt: skip
    config, tensors = ({name: value for name, value in one.items() if value is not None} for one in both)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits_of(model: Decoder) -> Tensor:
    """The logits of one short text."""
    pool = KVPool(model.kv_shape, 4, BLOCK_SIZE, dtype=model.dtype)
    return ModelRunner(model, pool).run(Step((work_of(0, text_of(13, seed=2), tuple(range(4))),)))


def test_folders_as_others_write_them(get_family: GetFamily, tmp_path: Path) -> None:
    family = get_family("deepseek v3")
    rope = entries_of(family.folder)["rope_parameters"]
    older = {
        "rope_parameters": None,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {**rope, "rope_type": None, "rope_theta": None, "type": "yarn"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    extra = {f"model.layers.{NUM_LAYERS}.{name}.weight": torch.zeros(2, 3) for name in ("eh_proj", "mlp.up_proj")}
    check_equal("logits", logits_of(load_decoder(copy_of(family, tmp_path, older, extra))), logits_of(family.model))
    family.oracle.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    check_equal("logits", logits_of(load_decoder(tmp_path / "shards")), logits_of(family.model))


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("qwen2, windows from the third layer on", {}),
        ("qwen2", {"sliding_window": WINDOW, "max_window_layers": 0, "use_sliding_window": False}),
        ("qwen3", {"sliding_window": WINDOW, "max_window_layers": 0, "use_sliding_window": None}),
    ],
)
def test_windows_of_folders_that_do_not_name_the_kind_of_each_layer(
    get_family: GetFamily, tmp_path: Path, name: str, entries: dict[str, Any]
) -> None:
    family = get_family(name)
    folder = copy_of(family, tmp_path, {"layer_types": None, **entries}, {})
    check_equal("logits", logits_of(load_decoder(folder)), logits_of(family.model))


def test_mixtral_turns_by_its_own_base_where_its_folder_names_none(get_family: GetFamily, tmp_path: Path) -> None:
    import transformers

    family, theta = get_family("mixtral"), transformers.MixtralConfig().rope_parameters["rope_theta"]
    silent = load_decoder(copy_of(family, tmp_path, {"rope_parameters": None}, {}))
    named = load_decoder(copy_of(family, tmp_path, {"rope_parameters": {"rope_theta": theta}}, {}))
    check_equal("logits", logits_of(silent), logits_of(named))


@pytest.mark.parametrize(
    "given", [{}, {"mscale": 0.7}, {"mscale_all_dim": 1.2}, {"mscale": 0.7, "mscale_all_dim": 1.2}]
)
def test_yarn_lets_rotated_parts_grow_as_transformers_does(given: dict[str, float]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 50.0}
    config = transformers.DeepseekV3Config(rope_parameters={**rope, **given})
    assert Yarn(4.0, 32, **given).rope_gain == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](config)[1])


def test_half_precision_is_near(get_family: GetFamily) -> None:
    for name in ("llama", "qwen3, windows in every other layer", "deepseek v2"):
        family = get_family(name)
        half = load_decoder(family.folder, torch.bfloat16)
        assert half.dtype == torch.bfloat16
        got, want = logits_of(half).float(), logits_of(family.model)
        assert float((got - want).abs().mean()) < 0.1 * float(want.abs().mean())


def test_what_decides_between_experts_is_not_rounded(get_family: GetFamily, tmp_path: Path) -> None:
    bias = torch.tensor([1000.0, 1003.0, 1002.0, 1001.0, 0.0, 0.0, 0.0, 0.0])  # bfloat16 has 1000 and 1004
    weights = {"model.layers.1.mlp.gate.e_score_correction_bias": bias}
    model = load_decoder(copy_of(get_family("deepseek v3"), tmp_path, {}, weights), torch.bfloat16)
    hidden = torch.randn(20, 36, generator=torch.Generator().manual_seed(3)).bfloat16()
    layers: list[Any] = [model._layers[1], load_decoder(get_family("mixtral").folder, torch.bfloat16)._layers[1]]
    (chosen, _), (_, shares) = (layer._feed_forward._route(hidden) for layer in layers)
    assert chosen.sort(dim=-1).values.tolist() == [[1, 2, 3]] * 20
    assert shares.dtype == torch.float32


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; .* LlamaForCausalLM, "),
    ("llama", {"architectures": None}, "one architecture, got None"),
    ("llama", {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "one architecture"),
    ("llama", {"model_type": "granite"}, "model_type 'granite' is not that of LlamaForCausalLM; it must be 'llama'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    ("llama", {"num_hidden_layers": 4}, "lacks the weights model.layers.3"),
    ("llama", {"num_hidden_layers": 2}, "does not know the weights model.layers.2"),
    ("llama", {"intermediate_size": 45}, "mlp.gate_proj.weight must have the shape .45, 36"),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "'yarn'"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ("qwen3, windows in every other layer", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ("qwen3, windows in every other layer", {"layer_types": ["full_attention"] * 2}, "windows must name one"),
    ("qwen3, windows in every other layer", {"use_sliding_window": False}, "use_sliding_window is false"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"use_sliding_window": False}, "use_sliding_window False"),
    ("ministral", {"max_window_layers": 2}, "max_window_layers 2"),
    ("mixtral, windows", {"use_sliding_window": False}, "use_sliding_window False"),
    ("mixtral, windows", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("mixtral", {"num_experts_per_tok": 6}, "top_k must be at most the 5 experts"),
    ("mixtral", {"num_local_experts": None}, "no entry 'num_local_experts'"),
    ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek v2", {"topk_method": "random"}, "topk_method 'random'"),
    ("deepseek v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek v3", {"num_hidden_layers": 2}, "does not know the weights model.layers.2"),
    ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    ("deepseek v3", {"rope_interleave": False}, "rope_interleave False"),
    ("deepseek v3", {"n_group": 3}, "num_groups must divide the 8 experts"),
    ("deepseek v3", {"num_experts_per_tok": 5}, "1 of 2 groups do not have the 5 experts"),
    ("deepseek v3", {"rope_parameters": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}},
     "factor"),
    ("deepseek v3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ("deepseek v3", {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("deepseek v3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "contradict"),
    ("deepseek v3", {"kv_lora_rank": "much"}, "kv_lora_rank"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "entries", "message"), UNSUPPORTED)
def test_what_is_not_followed_is_refused_by_name(
    get_family: GetFamily, tmp_path: Path, name: str, entries: dict[str, Any], message: str
) -> None:
    family = get_family(name)
    assert load_decoder(copy_of(family, tmp_path, {}, {})).vocab_size == VOCAB_SIZE
    with pytest.raises(CheckpointError, match=message):
        load_decoder(copy_of(family, tmp_path, entries, {}))


def test_weights_that_do_not_fit_are_refused_by_name(get_family: GetFamily, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    for wrong, message in (
        (None, f"lacks the weights {name}"),
        (torch.ones(9), f"{name} must have the shape"),
        (torch.ones(8, dtype=torch.int8), f"{name} must be floating point"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_decoder(copy_of(get_family("qwen3"), tmp_path, {}, {name: wrong}))  # type: ignore[dict-item]


def test_a_folder_with_its_tokenizer_is_served_by_its_name(get_family: GetFamily, tmp_path: Path) -> None:
    family = get_family("deepseek v2")
    copy_of(family, tmp_path, {}, {})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (bundled_folder() / name).is_file():
            (tmp_path / name).write_bytes((bundled_folder() / name).read_bytes())
    engine = Engine(str(tmp_path), EngineConfig(num_blocks=4))
    prompt = text_of(6, seed=9)
    answer = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0][0]
    assert answer.tokens == tuple(family.logits((*prompt, *answer.tokens))[5:-1].argmax(dim=-1).tolist())
    assert answer.text == engine.tokenizer.decode(answer.tokens)


def test_names_that_stand_for_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model is called 'nothing'"):
        loading.load("nothing")
    with pytest.raises(CheckpointError, match="has no config"):
        loading.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Expecting property name"):
        loading.load(str(tmp_path))
