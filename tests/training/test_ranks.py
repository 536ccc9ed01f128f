"""Trainers of several ranks against one of one: the same gradient, metrics and weights, through death and resumption.

Ranks are real processes that meet over gloo. Comparisons are in float64, so that only a wrong sum could make a difference;
transformers' norms compute in float32 inside, which is why sums in another order differ by some 1e-9. One is in float32, which
is what runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from evergrad.training import LossConfig, TrainerClient, TrainerConfig, TrainerError, UpdatesConfig
from evergrad.training.checkpoint import read_checkpoint
from evergrad.training.ranks import RanksLost
from evergrad.training.trainer import Trainer
from evergrad.transfer import SlotPublisher, TransferError, load_tensors
from evergrad.types import TrainingBatch
from tests.training.conftest import make_batch, make_sample, unshared
from tests.training.test_critic import PPO, appraised

CROSS_ENTROPY, RL = LossConfig(name="cross_entropy"), LossConfig()
DPO = LossConfig(name="dpo")
GRPO = LossConfig(name="grpo", options={"kl_coef": 0.1})
CLOSE = {"rtol": 0.0, "atol": 1e-6}
DEPENDS_ON_THE_CUT = {"seconds", "tokens_per_s", "memory_gib", "trained_tokens", "micro_batches"}
"""A tree that is cut in two has its trunk in both parts."""


def config_of(
    folder: Path,
    method: str,
    ranks: int = 1,
    tensor_parallel: int = 1,
    dtype: str = "float64",
    micro_batch_tokens: int = 40,
    **fields: object,
) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": str(folder),
            "method": "lora" if method == "dora" else method,
            "lora": {"dora": method == "dora"},
            "ranks": ranks,
            "tensor_parallel": tensor_parallel,
            "threads": 1,
            "dtype": dtype,
            "micro_batch_tokens": micro_batch_tokens,
            # Adam divides by |g| + eps: with its own 1e-8, rounding decides the step of a weight with as small a gradient.
            "optimizer": {"lr": 0.01, "eps": 1e-4},
            "critic": {"hidden": 16, "lr": 0.02},
            "device": "cpu",
            **fields,
        }
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def preferences(trainer: Trainer) -> TrainingBatch:
    """Pairs, with the reference that full fine-tuning wants of them."""
    samples = []
    for number in range(5):
        prompt = [3, 4, 5 + number % 2]
        for sign, answer in ((1.0, [7, 8, 9][: 1 + number % 3]), (-1.0, [7, 11 + number])):
            size = len(prompt) + len(answer)
            fields = {"group_id": f"g{number}", "rollout_id": f"g{number}{sign}", "advantages": (sign,) * size}
            samples.append(make_sample(prompt, answer, **fields, reference_logprobs=(-2.0 - number / 8,) * size))
    return TrainingBatch(tuple(samples), sum(sum(sample.loss_mask) for sample in samples))


def brought(batch: TrainingBatch) -> TrainingBatch:
    from dataclasses import replace

    samples = tuple(replace(each, reference_logprobs=(-3.0,) * len(each.token_ids)) for each in batch.samples)
    return replace(batch, samples=samples)


def gradient(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    """Of the only step since a reset, as the optimizer's first moment has it: clipped, times 1 − β₁."""
    trainer.save(folder)
    checkpoint = read_checkpoint(folder, {})
    return {name: values["exp_avg"] for name, values in checkpoint.optimizer.items()}


# -- trainers of their own; first, as a process has one group of ranks at a time ---------------------------------------------


@pytest.mark.slow
def test_what_two_ranks_saved_four_go_on_from(model_folder: Path, tmp_path: Path) -> None:
    with closing(Trainer(config_of(model_folder, "full", 2))) as two:
        two.step(make_batch(0), CROSS_ENTROPY)
        two.save(tmp_path / "c")
        saved = weights(two)
        two.step(make_batch(1), CROSS_ENTROPY)
        expected = weights(two)
    with closing(Trainer(config_of(model_folder, "full", 4, 2))) as four:
        four.load(tmp_path / "c")
        assert equal(weights(four), saved)
        four.step(make_batch(1), CROSS_ENTROPY)
        for name, tensor in four.named_weights():
            torch.testing.assert_close(tensor, expected[name], **CLOSE)
        # What goes wrong on the first rank alone leaves the others waiting: they end, and it says so.
        ranks = psutil.Process().children()
        assert len(ranks) == 3
        four._passes = None  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(RanksLost, match="rank 0 failed: AttributeError"):
                four.step(make_batch(1), CROSS_ENTROPY)
        assert not psutil.wait_procs(ranks, timeout=15)[1]


def test_several_updates_over_two_ranks_are_those_of_one(model_folder: Path) -> None:
    """Mini-batches, the policy before the first of them, and rollouts of two samples that one rank must hold together."""
    from dataclasses import replace

    updates, gspo = UpdatesConfig(epochs=2, mini_batches=2), {"anchor": "proximal", "clip_low": 0.2, "clip_high": 0.2}
    batches = []
    for seed in range(2):
        batch = make_batch(seed)
        samples = tuple(replace(each, rollout_id=each.rollout_id.replace(".3", ".1")) for each in batch.samples)
        batches.append(replace(batch, samples=samples))
    with closing(Trainer(config_of(model_folder, "lora", 2))) as two:
        one = Trainer(config_of(model_folder, "lora"))
        for batch in batches:
            for loss in (LossConfig(name="decoupled_ppo"), LossConfig(name="gspo", options=gspo)):
                found, expected = two.step(batch, loss, updates=updates), one.step(batch, loss, updates=updates)
                assert found["updated"] == 4
                for name in expected.keys() - DEPENDS_ON_THE_CUT:
                    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        expected_weights = weights(one)
        for name, tensor in two.named_weights():
            torch.testing.assert_close(tensor, expected_weights[name], rtol=0.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_in_float32_the_gradient_is_the_same_however_it_is_cut_and_shared_out(
    model_folder: Path, tmp_path: Path, method: str
) -> None:
    """One micro-batch or several, one, two and four ranks, beginnings shared or not: each parameter's gradient within 1e-6.

    Halves of a layer add up in another order, which rounds once more in each: there it is 2e-6.
    """

    def of(name: str, *sizes: int, micro_batch_tokens: int = 40) -> dict[str, torch.Tensor]:
        found = {}
        with closing(Trainer(config_of(model_folder, method, *sizes, "float32", micro_batch_tokens))) as trainer:
            for kind, batch in (("shared", make_batch(0)), ("unshared", unshared(make_batch(0)))):
                trainer.reset()
                trainer.step(batch, RL)
                found |= {f"{kind}: {key}": each for key, each in gradient(trainer, tmp_path / f"{name} {kind}").items()}
        return found

    whole = of("whole", 1, 1, micro_batch_tokens=4096)
    for *sizes, tokens in ((1, 1, 40), (2, 1, 40), (2, 1, 4096), (4, 1, 40), (4, 2, 40)):
        found = of(f"{sizes} {tokens}", *sizes, micro_batch_tokens=tokens)
        assert found.keys() == whole.keys()
        for name, expected in whole.items():
            assert found[name].dtype == torch.float32
            difference = (found[name].double() - expected.double()).norm()
            assert difference <= (1e-6 if sizes[1] == 1 else 2e-6) * expected.double().norm(), (sizes, name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_rounded_weights_and_a_budget_give_two_ranks_the_gradient_of_one(
    model_folder: Path, tmp_path: Path, method: str
) -> None:
    """Both round the same weights the same way; the budget cuts the batch, and has layers computed twice."""
    found = []
    for ranks, gib in ((1, {"full": 0.0023, "lora": 0.0015}), (2, {"full": 0.0017, "lora": 0.0014})):
        fields = {"mixed_precision": True, "memory_gib": gib[method]}
        with closing(Trainer(config_of(model_folder, method, ranks, 1, "float32", 4096, **fields))) as trainer:
            metrics = trainer.step(make_batch(0), RL)
            found.append(gradient(trainer, tmp_path / f"{ranks}"))
            assert metrics["micro_batches"] > ranks
    for name, expected in found[0].items():
        difference = (found[1][name].double() - expected.double()).norm()
        assert difference <= 3e-2 * expected.double().norm(), name


def test_ranks_that_cannot_be_split_are_refused_before_they_start() -> None:
    with pytest.raises(ValueError, match="choose a divisor of ranks"):
        TrainerConfig(model="m", ranks=3, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"lora\.dora = false"):
        TrainerConfig.model_validate({"model": "m", "ranks": 2, "tensor_parallel": 2, "lora": {"dora": True}})


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "signal 9"),
        # Its argument is the descriptor that it hears the leader over; here it hears it out first.
        (f"exec {sys.executable} -c 'import os; os.read(int(os.sys.argv[3]), 9); os._exit(4)' \"$@\"", "exit code 4"),
    ],
)
def test_a_rank_that_cannot_start_is_an_error_and_leaves_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str
) -> None:
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "executable", str(executable))
    with pytest.raises(TrainerError, match=rf"the ranks do not start: rank 1 .*{cause}"):
        Trainer(config_of(model_folder, "lora", 2))
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join()  # one that found the trainer at work would end this process
    assert not list((tmp_path / "tmp").iterdir())
    assert not psutil.Process().children()
    assert not torch.distributed.is_initialized()


def test_a_rank_killed_at_rest_is_named_when_asked_next(model_folder: Path, tmp_path: Path) -> None:
    told: list[TrainerError] = []
    with closing(Trainer(config_of(model_folder, "lora", 2))) as trainer:
        trainer.watch(told.append)
        # While a checkpoint is written training goes on, and it holds what was there when it began.
        trainer.step(make_batch(0), CROSS_ENTROPY)
        before = weights(trainer)
        saving = trainer.begin_save(tmp_path / "c")
        trainer.step(make_batch(1), CROSS_ENTROPY)
        saving.result()
        assert not equal(weights(trainer), before)
        trainer.load(tmp_path / "c")
        assert equal(weights(trainer), before)
        (rank,) = psutil.Process().children()
        rank.kill()
        until = time.monotonic() + 15
        while not told:
            assert time.monotonic() < until, "nobody noticed"
            time.sleep(0.01)
        for ask in (
            lambda: trainer.step(make_batch(1), RL),
            lambda: trainer.logprobs((1, 2)),
            lambda: trainer.save(tmp_path / "d"),
        ):
            with pytest.raises(RanksLost, match=r"rank 1 of the trainer died \(signal 9\)") as raised:
                ask()
            assert raised.value is told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


async def test_a_killed_rank_ends_the_server_by_name_and_a_killed_server_leaves_no_rank(model_folder: Path) -> None:
    config = config_of(model_folder, "lora", 2)
    command = [sys.executable, "-m", "evergrad.training", "--config-json", config.model_dump_json(), "--die-with-parent"]

    async def start() -> tuple[asyncio.subprocess.Process, TrainerClient, psutil.Process]:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
        (rank,) = psutil.Process(process.pid).children()
        return process, TrainerClient(f"http://127.0.0.1:{hello['port']}"), rank

    (first, client, rank), (second, other, orphan) = await asyncio.gather(start(), start())
    async with client, other:
        for each in (client, other):
            assert (await each.step(make_batch(0), RL))["updated"] == 1
        big = make_batch(1, groups=60, size=8)
        doomed = asyncio.create_task(client.step(big, RL))
        while (await client.health())["operation"] != "step":  # noqa: ASYNC110 (it is another process that begins)
            await asyncio.sleep(0.01)
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(TrainerError, match=r"rank 1 of the trainer died \(signal 9\)"):
            await doomed
        assert await first.wait() == 1
        assert first.stderr is not None
        assert b"rank 1 of the trainer died (signal 9)" in await first.stderr.read()
        second.send_signal(signal.SIGKILL)
        await second.wait()
    assert not psutil.wait_procs([orphan], timeout=15)[1], "a rank outlived its leader"


# -- trainers for all that follows, started once -------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("lora", 2, 1),
        ("full", 2, 1),
        ("lora", 4, 2),
        pytest.param(("full", 2, 2), marks=pytest.mark.slow),
        pytest.param(("full", 4, 2), marks=pytest.mark.slow),
        pytest.param(("full", 4, 1), marks=pytest.mark.slow),
        pytest.param(("lora", 4, 1), marks=pytest.mark.slow),
        pytest.param(("dora", 2, 1), marks=pytest.mark.slow),
    ],
    ids=lambda given: f"{given[0]}-{given[1]}-ranks-tensor-parallel-{given[2]}",
)
def pair(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[tuple[Trainer, Trainer]]:
    """A trainer of one rank and one of several, for all tests of the module: starting ranks takes seconds."""
    method, ranks, tensor_parallel = request.param
    before = torch.get_num_threads()
    one = Trainer(config_of(model_folder, method))
    with closing(Trainer(config_of(model_folder, method, ranks, tensor_parallel))) as several:
        yield one, several
    torch.set_num_threads(before)


@pytest.fixture
def fresh(pair: tuple[Trainer, Trainer]) -> tuple[Trainer, Trainer]:
    for trainer in pair:
        trainer.reset()
    return pair


@pytest.mark.parametrize("name", ["rl", "grpo with a reference", "dpo", "one sample for all ranks", "cross entropy"])
def test_the_gradient_and_the_metrics_are_those_of_one_rank(fresh: tuple[Trainer, Trainer], tmp_path: Path, name: str) -> None:
    one, several = fresh
    lone = TrainingBatch((make_sample([3, 4], [5, 6, 7]),), 3)
    batch, loss = {
        "rl": (make_batch(0), RL),
        # A LoRA computes the reference itself, in a pass of its own.
        "grpo with a reference": (make_batch(1) if several.config.method == "lora" else brought(make_batch(1)), GRPO),
        "dpo": (preferences(several), DPO),
        "one sample for all ranks": (lone if several.config.method == "lora" else brought(lone), GRPO),
        "cross entropy": (make_batch(2), CROSS_ENTROPY),
    }[name]
    expected, found = one.step(batch, loss), several.step(batch, loss)
    assert expected.keys() == found.keys()
    for key in expected.keys() - DEPENDS_ON_THE_CUT:
        assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9), key
    left, right = gradient(one, tmp_path / "one"), gradient(several, tmp_path / "several")
    assert left.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for tensor in left.values())
    assert largest > 0
    for parameter in left:
        torch.testing.assert_close(right[parameter], left[parameter], rtol=0, atol=1e-6 * largest)


def test_weights_after_steps_are_those_of_one_rank_in_every_form(fresh: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, several = fresh
    for seed in range(2):
        for trainer in fresh:
            trainer.step(make_batch(seed), CROSS_ENTROPY)
    expected = weights(one)
    for name, tensor in several.named_weights():
        torch.testing.assert_close(tensor, expected[name], **CLOSE)
    assert one.layout() == several.layout()
    with SlotPublisher(several.layout()) as publisher:
        several.write_weights(publisher)
        publisher.finish(1)
        assert equal({name: view.clone() for name, view in publisher.views(0).items()}, weights(several))
    for number, trainer in enumerate(fresh):
        trainer.export(tmp_path / str(number))
    left, right = load_tensors(tmp_path / "0"), load_tensors(tmp_path / "1")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(right[name], left[name], **CLOSE)
    several.check_finite()
    # An export of one is where several can start, and the reference of a LoRA from then on.
    for trainer in fresh:
        trainer.reset(str(tmp_path / "0"))
        trainer.step(brought(make_batch(3)) if trainer.config.method == "full" else make_batch(3), GRPO)
    expected = weights(one)
    for name, tensor in several.named_weights():
        torch.testing.assert_close(tensor, expected[name], **CLOSE)


def test_the_critic_learns_what_that_of_one_rank_learns(fresh: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    """Also from a batch that has nothing for one of the ranks, and from a checkpoint on."""
    one, several = fresh
    lone = TrainingBatch((make_sample([3, 4], [5, 6, 7]),), 3)
    for seed, batch in enumerate((make_batch(0), lone, make_batch(1))):
        batch = appraised(one, batch, seed)
        updates = UpdatesConfig(epochs=2, mini_batches=1 if batch.num_valid_tokens == 3 else 2)
        expected, found = one.step(batch, PPO, updates=updates), several.step(batch, PPO, updates=updates)
        assert expected["critic_grad_norm"] > 0
        for key in expected.keys() - DEPENDS_ON_THE_CUT:
            assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-7), key
    several.save(tmp_path / "c")
    assert one._critic is not None
    learned = read_checkpoint(tmp_path / "c", {}).critic
    assert learned.keys() == one._critic.state().keys()
    for name, tensor in one._critic.state().items():
        torch.testing.assert_close(learned[name], tensor, **CLOSE)
    several.reset()
    several.load(tmp_path / "c")
    for left, right in zip(one.values(make_batch(2).samples), several.values(make_batch(2).samples), strict=True):
        for expected_row, row in zip(left, right, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-5)  # after ten updates of the policy


def test_scores_are_those_of_one_rank(fresh: tuple[Trainer, Trainer]) -> None:
    one, several = fresh
    samples = (*make_batch(4).samples, make_sample([3], [4], loss_mask=(0, 0)))
    # A score between steps gathers weights; the next step's must not be those.
    for trainer in fresh:
        trainer.score(samples)
        trainer.step(make_batch(0), CROSS_ENTROPY)
    for reference in (False, True) if one.config.method == "lora" else (False,):
        for expected, found in zip(
            one.score(samples, reference=reference), several.score(samples, reference=reference), strict=True
        ):
            assert found == pytest.approx(expected, abs=1e-6)
    assert several.logprobs((5, 6, 7, 8)) == pytest.approx(one.logprobs((5, 6, 7, 8)), abs=1e-6)


def test_refusals_and_half_read_weights_leave_the_ranks_together(fresh: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    _, several = fresh
    before = weights(several)
    with pytest.raises(TrainerError, match="position 2: advantages is not finite"):
        several.step(TrainingBatch((make_sample([3, 4], [5], advantages=(0.0, 0.0, float("inf"))),), 1), RL)
    with pytest.raises(TrainerError, match="no readable checkpoint"):
        several.load(tmp_path / "nothing")
    with pytest.raises((TrainerError, TransferError)):
        several.reset(str(tmp_path / "nothing"))
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match="could not write"):
        several.save(tmp_path / "file" / "c")
    assert several.step(TrainingBatch((), 0), RL)["updated"] == 0
    next(several.named_weights())
    assert equal(weights(several), before)
    assert several.step(make_batch(0), RL)["updated"] == 1


def test_a_checkpoint_resumes_in_the_same_bits_and_on_one_rank(fresh: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, several = fresh
    several.step(make_batch(0), CROSS_ENTROPY)
    several.policy_version = 17
    several.save(tmp_path / "c")
    saved = weights(several)
    for seed in (1, 2):
        several.step(make_batch(seed), CROSS_ENTROPY)
    straight = weights(several)
    several.reset()
    several.load(tmp_path / "c")
    assert (several.updates, several.policy_version) == (1, 17)
    assert equal(weights(several), saved)
    for seed in (1, 2):
        several.step(make_batch(seed), CROSS_ENTROPY)
    assert equal(weights(several), straight)

    one.load(tmp_path / "c")
    assert (one.updates, one.policy_version) == (1, 17)
    assert equal(weights(one), saved)
    # And back: what one process writes, several read.
    one.save(tmp_path / "whole")
    several.reset()
    several.load(tmp_path / "whole")
    assert equal(weights(several), saved)
    for seed in (1, 2):
        one.step(make_batch(seed), CROSS_ENTROPY)
        several.step(make_batch(seed), CROSS_ENTROPY)
    assert equal(weights(several), straight)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, straight[name], **CLOSE)


def test_a_damaged_checkpoint_is_refused_by_all(fresh: tuple[Trainer, Trainer], tmp_path: Path) -> None:
    one, several = fresh
    several.step(make_batch(0), CROSS_ENTROPY)
    several.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    before = weights(several)
    part = max((tmp_path / "c").glob("*.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for trainer in (several, one):
        with pytest.raises(TransferError, match="does not match its checksum"):
            trainer.load(tmp_path / "c")
    part.unlink()
    for trainer in (several, one):
        with pytest.raises(TransferError, match="is missing"):
            trainer.load(tmp_path / "c")
    assert equal(weights(several), before)
