"""Weights that change under a running engine: whole or not at all, at a token boundary, and nothing old is reused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from evergrad.inference import EngineConfig, EngineError
from evergrad.inference.engine import Engine, Request
from evergrad.transfer import SlotPublisher, SlotReceiver, load_tensors
from evergrad.types import PolicySpan, Sampling
from tests.inference.conftest import Results, ask, finish, gather, load_reference, make_model, prompt_of, worst_error

MakeEngine = Callable[..., Engine]
TOLERANCE = 1e-4


def change(engine: Engine, folder: Path, version: int) -> None:
    engine.stage_weights(load_tensors(folder), whole=True)
    engine.commit(version)


def test_after_an_update_it_answers_as_a_cold_engine(engine: Engine, other_folder: Path) -> None:
    prompt, sampling = prompt_of(60), Sampling(temperature=0.9, max_tokens=20, seed=3)
    (before,) = ask(engine, prompt, sampling)
    change(engine, other_folder, 1)
    (after,) = ask(engine, prompt, sampling)
    cold = Engine(EngineConfig(model=str(other_folder), device="cpu", kv_cache_tokens=4096, block_size=8, policy_version=1))
    (expected,) = ask(cold, prompt, sampling)
    assert (after.token_ids, after.logprobs, after.spans) == (expected.token_ids, expected.logprobs, expected.spans)
    assert after.cached_tokens == 0
    assert after.token_ids != before.token_ids
    engine.stage_base()
    engine.commit(2)
    (back,) = ask(engine, prompt, sampling)
    assert (back.token_ids, back.logprobs) == (before.token_ids, before.logprobs)
    assert back.cached_tokens == 0


def test_running_requests_go_on_and_say_which_version_made_what(
    engine: Engine, reference: LlamaForCausalLM, other_folder: Path
) -> None:
    results: Results = {}
    prompts = {str(index): prompt_of(10 + index, seed=index) for index in range(16)}
    for name, prompt in prompts.items():
        engine.submit(Request(name, prompt, Sampling(max_tokens=18, seed=int(name))))
    for _ in range(7):
        gather(engine.step(), results)
    change(engine, other_folder, 1)
    for _ in range(5):
        gather(engine.step(), results)
    change(engine, other_folder, 2)
    finish(engine, results)
    for name, prompt in prompts.items():
        done = results[name, 0]
        assert len(done.token_ids) == 18
        assert done.spans == (PolicySpan(0, 0, 7), PolicySpan(1, 7, 12), PolicySpan(2, 12, 18))
        assert worst_error(reference, prompt, done, end=7) < TOLERANCE
        # What ran through the change holds keys of the old weights; a later prompt must not find them.
        (again,) = ask(engine, (*prompt, *done.token_ids), Sampling(max_tokens=4, seed=0), name=f"again-{name}")
        assert again.cached_tokens == 0
        assert worst_error(load_reference(other_folder), (*prompt, *done.token_ids), again) < TOLERANCE


def test_a_prompt_that_is_still_read_starts_over(make_engine: MakeEngine, other_folder: Path) -> None:
    engine = make_engine(max_batch_tokens=16)
    prompt = prompt_of(100)
    engine.submit(Request("a", prompt, Sampling(max_tokens=5, seed=1)))
    for _ in range(3):
        assert engine.step() == []
    change(engine, other_folder, 1)
    (done,) = finish(engine).values()
    assert done.spans == (PolicySpan(1, 0, 5),)
    assert worst_error(load_reference(other_folder), prompt, done) < TOLERANCE


def test_a_preempted_row_after_an_update_recomputes_under_the_new_weights(make_engine: MakeEngine, other_folder: Path) -> None:
    engine = make_engine(kv_cache_tokens=96, max_model_len=90)
    results: Results = {}
    for index in range(4):
        engine.submit(Request(str(index), prompt_of(20, seed=index), Sampling(max_tokens=30, seed=index)))
    for _ in range(8):
        gather(engine.step(), results)
    change(engine, other_folder, 1)
    finish(engine, results)
    assert engine.num_preemptions > 0
    assert all(len(done.token_ids) == 30 for done in results.values())
    assert all(done.spans[-1].policy_version == 1 for done in results.values())
    (fresh,) = ask(engine, prompt_of(20, seed=1), Sampling(max_tokens=5, seed=0), name="fresh")
    assert worst_error(load_reference(other_folder), prompt_of(20, seed=1), fresh) < TOLERANCE


def test_a_subset_stands_on_the_base_whatever_was_served_between(engine: Engine, other_folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    part = {name: load_tensors(other_folder)[name]}
    prompt, sampling = prompt_of(20), Sampling(max_tokens=10, seed=1)
    engine.stage_weights(part)
    engine.commit(1)
    (first,) = ask(engine, prompt, sampling)
    change(engine, other_folder, 2)
    engine.stage_weights(part)
    engine.commit(3)
    (second,) = ask(engine, prompt, sampling)
    assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)


def test_views_are_bound_not_copied(engine: Engine, other_folder: Path) -> None:
    tensors = load_tensors(other_folder)
    engine.stage_weights(tensors, whole=True)
    engine.commit(1)
    live = dict(engine.model._module.named_parameters())
    assert all(live[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    # Tied weights stay tied: one tensor, two places.
    assert engine.model._module.lm_head.weight.data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()


@pytest.mark.parametrize("fault", ["shape", "missing", "unknown", "nan", "empty"])
def test_a_refused_update_leaves_the_old_version_answering(engine: Engine, other_folder: Path, fault: str) -> None:
    prompt, sampling = prompt_of(30), Sampling(max_tokens=10, seed=1)
    (before,) = ask(engine, prompt, sampling)
    tensors = load_tensors(other_folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    if fault == "shape":
        tensors[name] = tensors[name][:-1]
    elif fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors[name.replace("q_proj", "qproj")] = tensors.pop(name)
    elif fault == "nan":
        tensors[name] = tensors[name].clone().index_fill_(0, torch.tensor([3]), float("nan"))
    else:
        tensors = {}
    with pytest.raises(EngineError, match="without" if fault == "empty" else "q_?proj"):
        engine.stage_weights(tensors, whole=True)
    with pytest.raises(EngineError, match="no weights are staged"):
        engine.commit(1)
    assert engine.policy_version == 0
    (after,) = ask(engine, prompt, Sampling(max_tokens=10, seed=1), name="after")
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=TOLERANCE)
    assert after.spans == (PolicySpan(0, 0, 10),)


def test_a_stage_that_fails_drops_what_was_staged(engine: Engine, other_folder: Path) -> None:
    engine.stage_weights(load_tensors(other_folder), whole=True)
    with pytest.raises(EngineError):
        engine.stage_weights({"nothing": torch.zeros(1)})
    with pytest.raises(EngineError):
        engine.commit(1)


def test_slots_of_a_publisher_become_live_without_a_copy(engine: Engine, tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(seed), seed=seed) for seed in range(10, 14)]
    prompt, sampling = prompt_of(25), Sampling(max_tokens=10, seed=5)
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in load_tensors(folders[0]).items()}
    with SlotPublisher(layout) as publisher, SlotReceiver(publisher.descriptor) as receiver:
        for version, folder in enumerate(folders, start=1):
            manifest = publisher.stage(load_tensors(folder).items(), version)
            receiver.prepare(manifest)
            receiver.verify()
            engine.stage_weights(receiver.tensors(), whole=True)
            engine.commit(version)
            receiver.commit()
            (done,) = ask(engine, prompt, sampling, name=str(version))
            assert worst_error(load_reference(folder), prompt, done) < TOLERANCE
        engine.stage_base()
        engine.commit(9)
