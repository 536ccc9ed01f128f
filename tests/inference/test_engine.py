"""The engine against transformers: same distributions, same greedy tokens, whatever was cached, shared, forked or moved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.bench_turns import measure
from transformers import GenerationConfig, LlamaForCausalLM

from evergrad.inference import EngineConfig, EngineError
from evergrad.inference._attention import PagedCache
from evergrad.inference.engine import Engine, Request, RequestError
from evergrad.types import FinishReason, PolicySpan, Sampling
from tests.inference.conftest import (
    VOCABULARY,
    Done,
    Results,
    ask,
    finish,
    gather,
    make_model,
    prompt_of,
    reference_logprobs,
    worst_error,
)

MakeEngine = Callable[..., Engine]
TOLERANCE = 1e-4


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 63, 200])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_transformers(
    engine: Engine, reference: LlamaForCausalLM, length: int, temperature: float
) -> None:
    prompt = prompt_of(length)
    for done in ask(engine, prompt, Sampling(temperature=temperature, max_tokens=20, seed=3), n=3):
        assert len(done.token_ids) == 20
        assert worst_error(reference, prompt, done, temperature) < TOLERANCE


def test_greedy_tokens_are_those_of_generate(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 45, 90)]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), prompt, Sampling(temperature=0.0, max_tokens=40)))
    results = finish(engine)
    settings = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    for index, prompt in enumerate(prompts):
        expected = reference.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        assert results[str(index), 0].token_ids == expected
        # Greedy completions report the model's own log-probability of what was taken.
        assert worst_error(reference, prompt, results[str(index), 0]) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("extra", [0, 1, 5, 30])
def test_prefix_hits_change_nothing(make_engine: MakeEngine, reference: LlamaForCausalLM, block_size: int, extra: int) -> None:
    engine = make_engine(block_size=block_size, draft_tokens=0)
    prompt = prompt_of(50)
    (first,) = ask(engine, prompt, Sampling(max_tokens=13, seed=1))
    assert first.cached_tokens == 0
    longer = (*prompt, *first.token_ids, *prompt_of(extra, seed=9))
    computed = engine.num_computed
    (second,) = ask(engine, longer, Sampling(max_tokens=10, seed=2))
    # All but the last drawn token was in the cache, to the token and not to the block; one must be computed in any case.
    expected_hit = min(len(prompt) + 12, len(longer) - 1)
    assert second.cached_tokens == expected_hit
    assert engine.num_computed - computed == len(longer) - expected_hit + 9
    assert worst_error(reference, longer, second) < TOLERANCE


def test_prompts_of_one_step_share_what_they_have_in_common(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    engine = make_engine(block_size=4, draft_tokens=0)
    system = prompt_of(40)
    prompts = [(*system, *prompt_of(6 + index, seed=index)) for index in range(5)]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), prompt, Sampling(max_tokens=1, seed=0)))
    results = finish(engine)
    assert engine.num_computed == 40 + sum(len(prompt) - 40 for prompt in prompts)
    for index, prompt in enumerate(prompts):
        assert worst_error(reference, prompt, results[str(index), 0]) < TOLERANCE


def test_a_group_is_one_row_until_its_tokens_part(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    engine = make_engine(draft_tokens=0)
    prompt = prompt_of(30)
    for index in range(8):
        engine.submit(Request(str(index), prompt, Sampling(temperature=0.7, max_tokens=25, seed=index)))
    assert engine.num_waiting == 1
    results = finish(engine)
    sequences = {index: tuple(results[str(index), 0].token_ids) for index in range(8)}
    distinct = {sequence[:length] for sequence in sequences.values() for length in range(1, 25)}
    # Every distinct prefix was computed exactly once.
    assert engine.num_computed == len(prompt) + len(distinct)
    for index in range(8):
        assert worst_error(reference, prompt, results[str(index), 0], 0.7) < TOLERANCE


def test_equal_greedy_requests_never_part(make_engine: MakeEngine) -> None:
    engine = make_engine(draft_tokens=0)
    for index in range(5):
        engine.submit(Request(str(index), prompt_of(10), Sampling(temperature=0.0, max_tokens=10, seed=index)))
    results = finish(engine)
    assert len({tuple(done.token_ids) for done in results.values()}) == 1
    assert engine.num_computed == 10 + 9


def test_one_seed_gives_a_group_that_differs_and_repeats(make_engine: MakeEngine) -> None:
    runs = []
    for _ in range(2):
        runs.append([tuple(done.token_ids) for done in ask(make_engine(), prompt_of(12), Sampling(max_tokens=12, seed=7), n=8)])
    assert len(set(runs[0])) > 1
    assert runs[0] == runs[1]


def test_tokens_do_not_depend_on_the_company(make_engine: MakeEngine) -> None:
    prompt, sampling = prompt_of(33), Sampling(temperature=0.9, max_tokens=20, seed=11)
    (alone,) = ask(make_engine(), prompt, sampling)
    crowd = make_engine(max_batch_tokens=48)
    results: Results = {}
    for index in range(6):
        crowd.submit(Request(f"before-{index}", prompt_of(20 + 7 * index, seed=index), Sampling(max_tokens=30, seed=index)))
    for _ in range(5):
        gather(crowd.step(), results)
    crowd.submit(Request("one", prompt, sampling))
    crowd.submit(Request("twin", prompt, Sampling(temperature=0.9, max_tokens=20, seed=12)))
    finish(crowd, results)
    assert results["one", 0].token_ids == alone.token_ids
    assert results["twin", 0].token_ids != alone.token_ids


def test_a_row_that_ended_is_left_alone(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    # The same prompt and seeds, with ever shorter limits: each is the beginning of the longest, and its blocks are not reused.
    engine = make_engine(block_size=4)
    prompt = prompt_of(21)
    for index in range(12):
        engine.submit(Request(str(index), prompt, Sampling(max_tokens=1 + 2 * index, seed=5)))
    results = finish(engine)
    longest = results["11", 0]
    for index in range(12):
        done = results[str(index), 0]
        assert done.token_ids == longest.token_ids[: 1 + 2 * index]
        assert done.finish_reason == FinishReason.LENGTH
    assert worst_error(reference, prompt, longest) < TOLERANCE


def test_a_stop_token_is_the_last_one(engine: Engine) -> None:
    prompt = prompt_of(18)
    (free,) = ask(engine, prompt, Sampling(max_tokens=12, seed=4))
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    (done,) = ask(engine, prompt, Sampling(max_tokens=12, seed=4, stop_token_ids=(stop,)))
    assert done.token_ids == free.token_ids[: first + 1]
    assert len(done.logprobs) == len(done.token_ids)
    assert done.finish_reason == FinishReason.STOP


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.8, "temperature": 1.3}])
def test_truncated_logprobs_are_of_what_was_drawn_from(
    engine: Engine, reference: LlamaForCausalLM, changes: dict[str, float]
) -> None:
    prompt = prompt_of(25)
    sampling = Sampling(max_tokens=15, seed=2, **changes)  # type: ignore[arg-type]
    (done,) = ask(engine, prompt, sampling)
    rows = reference_logprobs(reference, prompt, done.token_ids, sampling.temperature)
    for row, token, logprob in zip(rows, done.token_ids, done.logprobs, strict=True):
        kept: list[int] = []
        total = 0.0
        k_mass = float(row.exp().topk(sampling.top_k or VOCABULARY).values.sum())
        for candidate in row.argsort(descending=True).tolist()[: sampling.top_k or VOCABULARY]:
            if total / k_mass >= sampling.top_p:
                break
            kept.append(candidate)
            total += float(row[candidate].exp())
        assert token in kept
        assert abs(logprob - (float(row[token]) - float(torch.tensor(total, dtype=torch.float64).log()))) < TOLERANCE


def test_preemption_changes_nothing(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    requests = {
        str(index): (prompt_of(20 + index, seed=index), Sampling(temperature=0.8, max_tokens=40, seed=index))
        for index in range(8)
    }
    roomy, tight = make_engine(), make_engine(kv_cache_tokens=160, max_model_len=100)
    outcomes = []
    for engine in (roomy, tight):
        for name, (prompt, sampling) in requests.items():
            engine.submit(Request(name, prompt, sampling, n=2))
        outcomes.append(finish(engine))
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0
    for key, done in outcomes[1].items():
        assert done.token_ids == outcomes[0][key].token_ids
        assert worst_error(reference, requests[key[0]][0], done, 0.8) < TOLERANCE


def test_more_samples_than_rows(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    engine, prompt = make_engine(max_rows=3), prompt_of(15)
    results = ask(engine, prompt, Sampling(temperature=1.5, max_tokens=12, seed=1), n=20)
    assert all(len(done.token_ids) == 12 for done in results)
    assert all(worst_error(reference, prompt, done, 1.5) < TOLERANCE for done in results)
    assert [done.token_ids for done in results] == [
        done.token_ids for done in ask(make_engine(), prompt, Sampling(temperature=1.5, max_tokens=12, seed=1), n=20)
    ]


def test_a_context_that_fills_ends_by_length(engine: Engine) -> None:
    limit = engine.model.max_len
    (done,) = ask(engine, prompt_of(limit - 3), Sampling(max_tokens=100, seed=0))
    assert len(done.token_ids) == 3
    assert done.finish_reason == FinishReason.LENGTH


def test_abort_ends_one_request_and_spares_its_twin(engine: Engine) -> None:
    prompt = prompt_of(20)
    (expected,) = ask(engine, prompt, Sampling(max_tokens=20, seed=1))
    results: Results = {}
    engine.submit(Request("a", prompt, Sampling(max_tokens=20, seed=1)))
    engine.submit(Request("b", prompt, Sampling(max_tokens=20, seed=1)))
    while len(results.get(("a", 0), Done()).token_ids) < 4:
        gather(engine.step(), results)
    taken = len(results["a", 0].token_ids)
    gather(engine.abort("a"), results)
    assert engine.abort("a") == []
    finish(engine, results)
    assert results["a", 0].finish_reason == FinishReason.ABORT
    assert results["a", 0].token_ids == expected.token_ids[:taken]
    assert results["a", 0].spans == (PolicySpan(0, 0, taken),)
    assert results["b", 0].token_ids == expected.token_ids
    engine.submit(Request("a", prompt, Sampling(max_tokens=2)))
    engine.submit(Request("c", prompt, Sampling(max_tokens=2)))
    gather(engine.abort("a"), {})
    assert len(finish(engine)["c", 0].token_ids) == 2


@pytest.mark.parametrize("changes", [{}, {"block_size": 1}, {"kv_cache_tokens": 192, "max_model_len": 120, "max_rows": 5}])
def test_guesses_change_nothing_but_the_number_of_steps(
    make_engine: MakeEngine, reference: LlamaForCausalLM, changes: dict[str, int]
) -> None:
    """What was said once is guessed the second time: groups that part within a guess, stops and limits within it included."""
    prompts = [prompt_of(12 + index, seed=index) for index in range(10)]
    outcomes: list[Results] = []
    steps = []
    for draft_tokens in (0, 6):
        engine = make_engine(draft_tokens=draft_tokens, **changes)
        for turn in range(2):
            before = engine.num_steps
            for index, prompt in enumerate(prompts):
                temperature = 0.0 if index % 2 else 0.3
                sampling = Sampling(temperature=temperature, max_tokens=20 + index, seed=index, stop_token_ids=(77, 150))
                engine.submit(Request(f"{turn}-{index}", prompt, sampling, n=1 + index % 4))
            results = finish(engine)
        outcomes.append(results)
        steps.append(engine.num_steps - before)
        assert engine._pool.available == engine._pool.num_blocks
    assert engine.num_accepted > 60
    assert steps[1] < steps[0] / 2
    for (name, index), done in results.items():
        other, prompt = outcomes[0][name, index], prompts[int(name[2:])]
        assert (done.token_ids, done.finish_reason, done.spans) == (other.token_ids, other.finish_reason, other.spans)
        assert worst_error(reference, prompt, done, 1.0 if int(name[2:]) % 2 else 0.3) < TOLERANCE
    assert {done.finish_reason for done in results.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_the_order_of_arrival_changes_nothing_not_even_the_work(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that go on differently from one common phrase: what is guessed after it must not hang on who came last."""
    phrase = prompt_of(8, seed=1)
    names = [f"s{index}" for index in range(6)]
    telling = {name: (*phrase, *prompt_of(9, seed=50 + index)) for index, name in enumerate(names[:3])}
    asking = {name: (*prompt_of(9, seed=60 + index), *phrase) for index, name in enumerate(names[3:])}
    prompts = telling | asking
    outcomes = []
    for seed in range(4):
        engine, shuffler = make_engine(draft_tokens=6, draft_batch_tokens=256), random.Random(seed)
        computed: list[list[list[int]]] = []
        forward = engine.model.forward

        def note(chunks: Any, *rest: Any, forward: Any = forward, computed: Any = computed) -> torch.Tensor:
            computed.append([chunk.token_ids for chunk in chunks])
            return forward(chunks, *rest)

        monkeypatch.setattr(engine.model, "forward", note)
        for name in names:
            engine.open_session(name)
        for turn in range(2):
            for name in shuffler.sample(names, len(names)):
                sampling = Sampling(temperature=0.5, max_tokens=16)
                engine.submit(Request(f"{name}-{turn}", (*prompts[name], *phrase[: turn * 8]), sampling, session_id=name))
            results = finish(engine)
        drawn = {key: (done.token_ids, done.logprobs) for key, done in sorted(results.items())}
        outcomes.append((drawn, computed))
        assert engine.num_drafted > 0
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_the_probe_is_transformers_forward(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    engine = make_engine(max_batch_tokens=16, kv_cache_tokens=128, max_model_len=128)
    tokens = prompt_of(100)
    expected = reference_logprobs(reference, tokens[:1], tokens[1:])[range(99), tokens[1:]]
    engine.submit(Request("running", prompt_of(40, seed=3), Sampling(max_tokens=30, seed=1)))
    results: Results = {}
    for _ in range(6):
        gather(engine.step(), results)
    found = engine.logprobs(tokens)  # makes the running row give way, and that one recovers
    assert float((torch.tensor(found, dtype=torch.float64) - expected).abs().max()) < TOLERANCE
    finish(engine, results)
    assert worst_error(reference, prompt_of(40, seed=3), results["running", 0]) < TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((), "empty"), (tuple([5] * 256), "256 tokens"), ((5, VOCABULARY), "outside of the vocabulary"), ((-1,), "outside")],
)
def test_what_can_never_be_served_is_refused(engine: Engine, tokens: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(Request("x", tokens, Sampling()))
    assert not engine.has_work


def test_random_load_keeps_every_promise(make_engine: MakeEngine, reference: LlamaForCausalLM) -> None:
    """Overlapping prompts, tight memory, small batches, aborts: each answer is still its own prompt's continuation."""
    random.seed(0)
    engine = make_engine(kv_cache_tokens=160, max_model_len=120, max_batch_tokens=40, max_rows=10, block_size=4)
    trunk = prompt_of(60)
    pending, results, asked = 40, Results(), {}
    while pending or engine.has_work:
        while pending and random.random() < 0.5:
            pending -= 1
            prompt = (*trunk[: random.randint(1, 60)], *prompt_of(random.randint(0, 20), seed=pending % 5))
            sampling = Sampling(temperature=0.8, max_tokens=random.randint(1, 25), seed=pending)
            asked[str(pending)] = (prompt, sampling)
            engine.submit(Request(str(pending), prompt, sampling, n=random.randint(1, 4)))
        if random.random() < 0.05 and asked:
            gather(engine.abort(random.choice(list(asked))), results)
        if engine.has_work:
            gather(engine.step(), results)
    assert engine.num_preemptions > 0
    for (name, _), done in results.items():
        prompt, sampling = asked[name]
        assert done.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        if done.finish_reason == FinishReason.LENGTH:
            assert len(done.token_ids) == sampling.max_tokens
        if done.token_ids:
            assert worst_error(reference, prompt, done, 0.8) < TOLERANCE
    # Nothing leaks: with no row left, every block can be taken.
    assert engine._pool.available == 160 // 4


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model here"):
        Engine(EngineConfig(model=str(tmp_path)))
    make_model(tmp_path / "cut", seed=0)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(EngineError, match="cannot be loaded"):
        Engine(EngineConfig(model=str(tmp_path / "cut")))


def test_a_model_that_is_computed_wrongly_is_not_served(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedCache.attend
    monkeypatch.setattr(PagedCache, "attend", lambda self, *args, **options: attend(self, *args, **options) * 1.01)
    with pytest.raises(EngineError, match="differ from transformers"):
        Engine(EngineConfig(model=str(model_folder), device="cpu", kv_cache_tokens=512))


def test_a_model_that_gives_no_numbers_fails_its_request_only(engine: Engine) -> None:
    weight = engine.model._module.model.norm.weight
    weight.data.fill_(float("nan"))
    (done,) = ask(engine, prompt_of(5), Sampling(max_tokens=3))
    assert done == Done(finish_reason=FinishReason.ABORT, error="the model gave values that are not finite")
    weight.data.fill_(1.0)
    (done,) = ask(engine, prompt_of(6, seed=2), Sampling(max_tokens=3), name="two")
    assert done.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("changes", [{}, {"block_size": 16, "max_batch_tokens": 64, "max_rows": 6}])
def test_conversations_are_not_read_again(tmp_path: Path, changes: dict[str, int]) -> None:
    """A turn computes what came since the turn before, and each distinct token of a group once."""
    counted = measure(tmp_path, groups=2, samples=4, turns=4, **changes)
    assert counted["tokens_needed"] <= counted["tokens_computed"]
    assert counted["recomputed_share"] <= 0.02
