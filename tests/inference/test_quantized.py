"""Products in int8: near to the exact ones by a bound, the same in any company, of the weights that are live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from evergrad.inference import EngineClient, EngineConfig, EngineError
from evergrad.inference._linear import PackedLinear
from evergrad.inference._quantized import QuantizedRows, QuantizedWeight
from evergrad.inference.engine import Engine, Request
from evergrad.transfer import SlotPublisher, load_tensors
from evergrad.types import Sampling
from tests.inference.conftest import Done, ask, finish, load_reference, prompt_of, reference_logprobs, worst_error
from tests.inference.test_families import FAMILIES, make_adapter, make_engine, make_folder, reference_of, tuned_reference
from tests.inference.test_server import serving

GAP = 0.6
"""Nats by which a token's log-probability may differ from the exact model's: these models are 64 wide and sharp; what is wrong
by a layer is wrong by several."""


def spread(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks of inputs times Hadamard's matrix, in double precision."""
    width = values.shape[-1]
    block = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    return (values.reshape(-1, block) @ (hadamard(block) / block**0.5)).reshape(values.shape)


def integers(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[rows, width] as whole numbers in [-127, 127] and [rows, 1] scales, in double precision."""
    turned = spread(values)
    scales = np.abs(turned).max(axis=-1, keepdims=True) / 127
    return np.rint(turned / np.where(scales > 0, scales, 1.0)), scales


@given(st.integers(0, 130), st.sampled_from([2, 3, 48, 64, 100, 192, 576]), st.integers(1, 130), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_product_is_as_near_as_its_rounding_allows(rows: int, inputs: int, outputs: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    left, right = generator.standard_normal((rows, inputs)), generator.standard_normal((outputs, inputs))
    left[:, generator.integers(inputs)] *= 50  # activations have such places
    left[: rows // 3] = 0.0
    with torch.inference_mode():
        weight = QuantizedWeight.of(torch.from_numpy(right).float())
        found = weight.product(QuantizedRows.of(torch.from_numpy(left).float())).double().numpy()
    (ours, our_scales), (theirs, their_scales) = integers(left), integers(right)
    # Half a unit of each factor for each input: the triangle inequality over (x + dx)(w + dw) − x w.
    of_rows, of_weights = np.abs(spread(left)).sum(-1, keepdims=True), np.abs(spread(right)).sum(-1)
    bound = of_rows * their_scales.T / 2 + our_scales * of_weights / 2 + inputs * our_scales * their_scales.T / 4
    assert found.shape == (rows, outputs)
    assert (np.abs(found - left @ right.T) <= bound * 1.001 + 1e-5).all()
    # A number that float32 puts on the other side of a half is one unit off; no other is.
    expected = (ours @ theirs.T) * our_scales * their_scales.T
    typical = np.abs(found - expected).mean() if rows else 0.0
    assert typical <= 0.02 * float(np.abs(expected).mean() if rows else 0.0) + 1e-6
    assert np.abs(weight.dequantized().double().numpy() - spread(theirs * their_scales)).max() <= their_scales.max() * 1.01


def test_every_output_of_a_large_weight_has_its_own_scale() -> None:
    torch.manual_seed(2)
    weight = torch.randn(2100, 64) * torch.rand(2100, 1)
    quantized = QuantizedWeight.of(weight)
    # Half a unit in each of the 64 places of a block, which the rotation back adds up to 8 halves at most.
    assert ((quantized.dequantized() - weight).abs() <= 4.01 * quantized.scales[:, None]).all()


def test_a_weight_with_one_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one input"):
        QuantizedWeight.of(torch.ones(3, 1))


def test_one_large_number_costs_its_row_little() -> None:
    """As activations are: without spreading it, the others of its row would lose most of their bits."""
    torch.manual_seed(0)
    rows, weight = torch.randn(16, 576), torch.randn(64, 576)
    rows[:, 7] = 200.0
    exact = rows.double() @ weight.double().T
    found = QuantizedWeight.of(weight).product(QuantizedRows.of(rows)).double()
    scales = rows.abs().amax(-1, keepdim=True) / 127
    plain = (rows / scales).round() * scales
    ordinary = exact - rows[:, 7:8].double() * weight[:, 7].double()
    plain_error = (plain.double() @ weight.double().T - exact).std() / ordinary.std()
    assert (found - exact).std() / ordinary.std() < plain_error / 3


def test_rows_beside_it_change_nothing() -> None:
    torch.manual_seed(1)
    rows, weight = torch.randn(40, 192), QuantizedWeight.of(torch.randn(96, 192))
    quantized = QuantizedRows.of(rows)
    one_by_one = [weight.product(QuantizedRows(quantized.values[i : i + 1], quantized.scales[i : i + 1])) for i in range(40)]
    assert torch.equal(weight.product(quantized), torch.cat(one_by_one))


def dequantized_reference(folder: Path) -> Any:
    """transformers' model with each linear layer replaced by what int8 stands for, in double precision."""
    model = load_reference(folder).double()

    def stand_in(layer: torch.nn.Linear) -> Any:
        values, scales = integers(layer.weight.detach().numpy())

        def forward(input: torch.Tensor) -> torch.Tensor:
            rows, row_scales = integers(input.reshape(-1, layer.in_features).numpy())
            product = torch.from_numpy((rows @ values.T) * row_scales * scales.T)
            return (product if layer.bias is None else product + layer.bias).view(*input.shape[:-1], layer.out_features)

        return forward

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = stand_in(module)
    return model


def mean_error(model: Any, prompt: tuple[int, ...], done: Done) -> float:
    expected = reference_logprobs(model, prompt, done.token_ids)[range(len(done.token_ids)), done.token_ids]
    return float((torch.tensor(done.logprobs, dtype=torch.float64) - expected).abs().mean())


@pytest.mark.parametrize("family", ["llama-tied", "llama-untied-bias", "qwen2-tied", "qwen3", "mistral-window"])
def test_logprobs_are_those_of_what_was_drawn_from(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path / "model", FAMILIES[family], 0)
    engine, prompt = make_engine(folder, quantization="int8"), prompt_of(40)
    assert engine.quantization == "int8"
    done = [one for seed in range(3) for one in ask(engine, prompt, Sampling(max_tokens=24, seed=seed), n=2, name=str(seed))]
    stand_in, exact = dequantized_reference(folder), load_reference(folder)
    near = sum(mean_error(stand_in, prompt, one) for one in done) / len(done)
    far = sum(mean_error(exact, prompt, one) for one in done) / len(done)
    # What is left is a number here and there that falls on the other side of a half.
    assert near < far / 3
    assert 1e-3 < far < GAP / 4
    assert max(worst_error(exact, prompt, one) for one in done) < GAP


@pytest.mark.parametrize("family", ["gemma", "gemma3"])
def test_a_family_with_its_own_definition_is_quantized_too(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path / "model", FAMILIES[family], 0)
    engine, prompt = make_engine(folder, quantization="int8"), prompt_of(40)
    (done,) = ask(engine, prompt, Sampling(max_tokens=24, seed=1))
    assert 1e-4 < worst_error(reference_of(folder), prompt, done) < GAP


def test_a_proof_is_of_the_weights_themselves(model_folder: Path) -> None:
    engine, prompt = make_engine(model_folder, quantization="int8"), prompt_of(30)
    expected = reference_logprobs(load_reference(model_folder), prompt[:1], prompt[1:])[range(29), prompt[1:]].tolist()
    assert engine.logprobs(prompt, exact=True) == pytest.approx(expected, abs=1e-4)
    drawn_from = engine.logprobs(prompt)
    assert drawn_from != pytest.approx(expected, abs=1e-3)
    assert engine.logprobs(prompt) == drawn_from


def test_a_prefix_from_the_cache_and_company_change_little(model_folder: Path) -> None:
    """Only a number on the border of rounding may fall the other way; tokens are those of a cold engine."""
    prompt, sampling = prompt_of(60), Sampling(max_tokens=12, seed=3)
    (alone,) = ask(make_engine(model_folder, quantization="int8"), prompt, sampling)
    engine = make_engine(model_folder, quantization="int8")
    ask(engine, prompt, Sampling(max_tokens=1, seed=1), name="before")
    for index in range(6):
        engine.submit(Request(f"beside-{index}", prompt_of(20, seed=index), Sampling(max_tokens=12, seed=index)))
    (found,) = ask(engine, prompt, sampling)
    assert found.cached_tokens > 40
    assert found.token_ids == alone.token_ids
    assert found.logprobs == pytest.approx(alone.logprobs, abs=0.05)


def test_a_change_of_weights_is_quantized_anew(model_folder: Path, other_folder: Path) -> None:
    prompt, sampling = prompt_of(40), Sampling(max_tokens=16, seed=2)
    engine = make_engine(model_folder, quantization="int8")
    (first,) = ask(engine, prompt, sampling)
    engine.stage_weights(load_tensors(other_folder), whole=True)
    engine.commit(1)
    (second,) = ask(engine, prompt, sampling)
    (cold,) = ask(make_engine(other_folder, quantization="int8"), prompt, sampling)
    assert (second.token_ids, second.logprobs) == (cold.token_ids, cold.logprobs)
    # A version that replaces one tensor stands on the base for all others.
    name = "model.layers.0.mlp.down_proj.weight"
    engine.stage_weights({name: load_tensors(other_folder)[name]})
    engine.commit(2)
    (mixed,) = ask(engine, prompt, sampling)
    assert mixed.logprobs not in (first.logprobs, second.logprobs)
    engine.stage_base()
    engine.commit(3)
    (back,) = ask(engine, prompt, sampling)
    assert (back.token_ids, back.logprobs) == (first.token_ids, first.logprobs)


def test_a_version_in_full_precision_is_an_ordinary_engine_to_the_bit(model_folder: Path, other_folder: Path) -> None:
    prompt, sampling = prompt_of(40), Sampling(max_tokens=16, seed=2)
    plain, engine = make_engine(model_folder), make_engine(model_folder, quantization="int8")
    assert plain.quantization is None
    for each in (plain, engine):
        each.stage_weights(load_tensors(other_folder), whole=True, full_precision=each is engine)
        each.commit(1)
    assert engine.quantization is None
    (expected,), (found,) = (ask(each, prompt, sampling) for each in (plain, engine))
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    engine.stage_weights(load_tensors(other_folder), whole=True)
    engine.commit(2)
    assert engine.quantization == "int8"
    (quantized,) = ask(engine, prompt, sampling)
    (cold,) = ask(make_engine(other_folder, quantization="int8"), prompt, sampling)
    assert (quantized.token_ids, quantized.logprobs) == (cold.token_ids, cold.logprobs)
    assert all(type(layer) is torch.nn.Linear or isinstance(layer, PackedLinear) for layer in linears(plain))


def linears(engine: Engine) -> list[torch.nn.Linear]:
    return [module for module in engine.model._module.modules() if isinstance(module, torch.nn.Linear)]


def test_adapters_are_added_to_what_was_quantized(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", FAMILIES["llama-tied"], 0)
    folders = {
        "first": make_adapter(base, tmp_path / "first", 2),
        "second": make_adapter(base, tmp_path / "second", 3, ("k_proj", "up_proj", "o_proj", "lm_head")),
    }
    engine, prompt = make_engine(base, quantization="int8"), prompt_of(40)
    for name, folder in folders.items():
        engine.add_adapter(engine.read_adapter(name, folder))
    models = {None: reference_of(base), **{name: tuned_reference(base, folder) for name, folder in folders.items()}}
    for name in models:
        engine.submit(Request(str(name), prompt, Sampling(max_tokens=16, seed=1), adapter=name))
    results = finish(engine)
    for name, model in models.items():
        assert worst_error(model, prompt, results[str(name), 0]) < GAP
        for other in models.keys() - {name}:
            assert worst_error(models[other], prompt, results[str(name), 0]) > GAP


def test_numbers_that_are_none_fail_their_request_alone(model_folder: Path) -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = float("nan")
    found = QuantizedWeight.of(torch.randn(8, 64)).product(QuantizedRows.of(rows))
    assert not torch.isfinite(found[1]).any()
    assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"dtype": "bfloat16"}, r"float32 on a CPU.*bfloat16"), ({"quantization": "int4"}, "quantization")],
)
def test_what_is_not_quantized_here_is_refused(model_folder: Path, changes: dict[str, str], told: str) -> None:
    with pytest.raises((EngineError, ValueError), match=told):
        make_engine(model_folder, **{"quantization": "int8", **changes})


def test_an_architecture_that_transformers_computes_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    folder = make_folder(tmp_path / "gpt2", GPT2Config(vocab_size=300, n_embd=64, n_layer=1, n_head=2, n_positions=64), 0)
    with pytest.raises(EngineError, match=r"quantizes nothing.*leave quantization out"):
        make_engine(folder, quantization="int8")


async def test_over_the_wire_a_version_is_quantized_unless_it_says_otherwise(model_folder: Path, other_folder: Path) -> None:
    prompt, tensors = prompt_of(30), load_tensors(other_folder)
    expected = reference_logprobs(load_reference(other_folder), prompt[:1], prompt[1:])[range(29), prompt[1:]].tolist()
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with serving(model_folder, quantization="int8") as server:
        async with server.client() as client:
            assert isinstance(client, EngineClient)
            with SlotPublisher(layout) as publisher:
                await client.attach(publisher.descriptor)
                for version, full_precision in ((1, False), (2, True), (3, False)):
                    manifest = publisher.stage(tensors.items(), version).as_dict()
                    report = await client.update_weights(manifest, full_precision=full_precision)
                    assert 0 <= report["stage_s"] <= report["seconds"]
                    assert (await client.health())["quantization"] == (None if full_precision else "int8")
                    assert await client.logprobs(prompt) == pytest.approx(expected, abs=1e-4)


def test_the_configuration_says_what_there_is() -> None:
    assert EngineConfig(model="m").quantization is None
