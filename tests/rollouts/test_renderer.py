"""Prompts are the template's own, and what was sampled is what is carried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.envs import Taskset
from evergrad.rollouts import Renderer, RendererError, assign_advantages, extends, run_rollout
from evergrad.types import Completion, FinishReason, Message, Outcome, PolicySpan, RolloutGroup, Sampling, Usage

TokenizerMaker = Callable[..., Any]

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BOS_TEMPLATE = f"<s>{HEAD}{{{{ m.content }}}}{TAIL}"
THINK_TEMPLATE = f"{HEAD}{{{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}}}{TAIL}"
TRIM_TEMPLATE = f"{HEAD}{{{{ m.content | trim }}}}{TAIL}"
TWO_ROLES_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + TAIL
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

ASK = (Message("system", "Tools:\norder(id)"), Message("user", "Where is order F50?"))
SHOWN = Message("tool", "in transit, arrives May 15")


def completion(ids: Sequence[int], finish: FinishReason = FinishReason.STOP, version: int = 0) -> Completion:
    count = len(ids)
    logprobs = tuple(-0.01 * (index + 1) for index in range(count))
    return Completion(tuple(ids), logprobs, finish, (PolicySpan(version, 0, count),), Usage(0, 0, count))


def template_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    plain = [each.as_dict() for each in messages]
    shown = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(shown, add_special_tokens=False))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [None, BOS_TEMPLATE])
def test_both_turns_are_the_templates_own_ids_with_one_start_token(
    make_tokenizer: TokenizerMaker, template: str | None, bos: bool
) -> None:
    tokenizer = make_tokenizer(bos=bos) if template is None else make_tokenizer(template, bos=bos)
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(ASK)
    said = completion(renderer.reply("order(id=F50)"))
    later = renderer.extend(ASK, prompt, said, [SHOWN])
    assert prompt == template_ids(tokenizer, ASK)
    assert later == template_ids(tokenizer, [*ASK, Message("assistant", "order(id=F50)"), SHOWN])
    assert extends(prompt, said, later)
    assert prompt.count(tokenizer.bos_token_id) == (1 if template else 0)


def test_the_newline_after_the_end_of_turn_is_there(make_tokenizer: TokenizerMaker) -> None:
    renderer = Renderer(make_tokenizer())
    prompt = renderer.prompt(ASK)
    said = completion(renderer.reply("order(id=F50)"))
    later = renderer.extend(ASK, prompt, said, [SHOWN])
    tail = renderer.decode(later[len(prompt) + len(said.token_ids) :])
    assert tail == f"\n<|im_start|>tool\n{SHOWN.content}<|im_end|>\n<|im_start|>assistant\n"


async def test_ids_that_would_tokenize_otherwise_are_trained_as_sampled(desk: Taskset, make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer)
    canonical = renderer.reply("order(id=F50)")
    split = (*(tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "order(id=F50)"), canonical[-1])
    assert split != canonical
    assert renderer.text(completion(split)) == "order(id=F50)"
    script = [split, renderer.reply("done")]

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, session_id: str) -> Completion:
        return completion(script.pop(0))

    rollout = await run_rollout(
        desk.tasks("train", 1)[0], desk, generate, renderer, Sampling(), rollout_id="r", group_id="g", source="train"
    )
    (sample,) = assign_advantages(RolloutGroup("g", (rollout,)), "constant")
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert tuple(trained) == split + renderer.reply("done")
    assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.advantages)
    logprobs = [value for value, mask in zip(sample.logprobs, sample.loss_mask, strict=True) if mask]
    assert logprobs == [value for turn in rollout.turns for value in turn.completion.logprobs]


async def test_no_template_tool_or_user_token_is_trained(desk: Taskset, renderer: Renderer) -> None:
    from evergrad.rollouts import scripted

    task = desk.tasks("train", 1, seed=5)[0]
    texts = desk.open(task).demonstrate()
    assert texts is not None
    rollout = await run_rollout(
        task, desk, scripted(texts, renderer), renderer, Sampling(), rollout_id="r", group_id="g", source="demonstration"
    )
    (sample,) = assign_advantages(RolloutGroup("g", (rollout,)), "constant")
    trained = renderer.decode([token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask])
    assert trained == "".join(f"{text}<|im_end|>" for text in texts)
    for index, mask in enumerate(sample.loss_mask):
        if not mask:
            assert sample.logprobs[index] == sample.advantages[index] == 0.0


def test_a_template_that_rewrites_history_makes_own_samples_and_trains_each_token_once(make_tokenizer: TokenizerMaker) -> None:
    from evergrad.types import Rollout, Turn

    tokenizer = make_tokenizer(THINK_TEMPLATE)
    renderer = Renderer(tokenizer)
    conversation = list(ASK)
    prompt, turns = renderer.prompt(conversation), []
    for text in ("<think>look it up</think>order(id=F50)", "<think>again</think>order(id=F51)", "It arrives May 15."):
        said = completion(renderer.reply(text))
        turns.append(Turn((), prompt, said))
        later = renderer.extend(conversation, prompt, said, [SHOWN])
        conversation += [Message("assistant", text), SHOWN]
        assert later == template_ids(tokenizer, conversation), "the prompt is what the template shows"
        prompt = later
    assert not extends(turns[0].prompt_token_ids, turns[0].completion, turns[1].prompt_token_ids)
    rollout = Rollout("r", "g", "t", tuple(turns), Outcome.SCORED, 1.0)
    samples = assign_advantages(RolloutGroup("g", (rollout,)), "constant")
    assert len(samples) == 3
    for sample, turn in zip(samples, turns, strict=True):
        assert sample.token_ids == turn.prompt_token_ids + turn.completion.token_ids
        assert sum(sample.loss_mask) == len(turn.completion.token_ids)


def test_trimmed_text_falls_back_to_a_prompt_of_its_own(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(TRIM_TEMPLATE)
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(ASK)
    for text, expected in ((" order(id=F50)", False), ("order(id=F50)", True)):
        said = completion(renderer.reply(text))
        later = renderer.extend(ASK, prompt, said, [SHOWN])
        assert later == template_ids(tokenizer, [*ASK, Message("assistant", text), SHOWN])
        assert extends(prompt, said, later) is expected


def test_another_stop_token_is_trained_and_does_not_pass_for_the_end_of_turn(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer)
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    body = renderer.reply("order(id=F50)")[:-1]
    said = completion((*body, end_of_text))
    prompt = renderer.prompt(ASK)
    later = renderer.extend(ASK, prompt, said, [SHOWN])
    assert renderer.text(said) == "order(id=F50)"
    assert later == template_ids(tokenizer, [*ASK, Message("assistant", "order(id=F50)"), SHOWN])
    assert not extends(prompt, said, later), "the engine saw another token there, so the turns are samples of their own"


def test_truncation_is_told_by_the_finish_reason_not_by_the_last_token(make_tokenizer: TokenizerMaker) -> None:
    renderer = Renderer(make_tokenizer())
    ids = renderer.reply("order(id=F50)")
    assert renderer.text(completion(ids, FinishReason.STOP)) == "order(id=F50)"
    assert renderer.text(completion(ids, FinishReason.LENGTH)) == "order(id=F50)<|im_end|>"
    assert renderer.end_of_turn_id in renderer.stop_token_ids


def test_a_template_of_two_alternating_roles_still_carries_system_and_tools(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(TWO_ROLES_TEMPLATE)
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(ASK)
    assert renderer.decode(prompt) == (
        "<|im_start|>user\nTools:\norder(id)\n\nWhere is order F50?<|im_end|>\n<|im_start|>assistant\n"
    )
    said = completion(renderer.reply("order(id=F50)"))
    later = renderer.extend(ASK, prompt, said, [SHOWN])
    assert extends(prompt, said, later)
    assert renderer.decode(later).endswith(
        f"order(id=F50)<|im_end|>\n<|im_start|>user\n{SHOWN.content}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_end_of_turn_ends_on_the_end_of_text(make_tokenizer: TokenizerMaker) -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    renderer = Renderer(tokenizer)
    assert renderer.end_of_turn_id is None
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    assert renderer.reply("hello")[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("none", "has no chat template"),
        ("{{ raise_exception('always') }}", "fails on a plain conversation"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "does not show"),
        ("{% for %}", "fails on a plain conversation"),
    ],
)
def test_a_template_that_cannot_carry_a_conversation_is_refused(
    make_tokenizer: TokenizerMaker, template: str, complaint: str
) -> None:
    tokenizer = make_tokenizer(None if template == "none" else template)
    with pytest.raises(RendererError, match=complaint):
        Renderer(tokenizer)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), split=st.booleans())
def test_any_conversation_extends_exactly(renderer: Renderer, texts: list[tuple[str, str]], split: bool) -> None:
    """Whatever is said and shown: the later prompt holds the earlier one and the sampled ids, and reads as the template's."""
    conversation = list(ASK)
    prompt = renderer.prompt(conversation)
    for spoken, shown in texts:
        ids = renderer.reply(spoken)
        if split:  # one token a byte: what no encoder would give, but a sampler might
            ids = (*(token for byte in spoken for token in renderer.reply(byte)[:-1]), ids[-1])
        said = completion(ids)
        if renderer.text(said) != spoken:  # a byte that is no text of its own
            return
        later = renderer.extend(conversation, prompt, said, [Message("tool", shown)])
        conversation += [Message("assistant", spoken), Message("tool", shown)]
        assert extends(prompt, said, later)
        assert renderer.decode(later) == renderer.decode(renderer.prompt(conversation))
        prompt = later


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(4, 300), min_size=1, max_size=30))
def test_any_sampled_ids_are_carried_on(renderer: Renderer, ids: list[int]) -> None:
    assert renderer.end_of_turn_id is not None
    said = completion((*ids, renderer.end_of_turn_id))
    prompt = renderer.prompt(ASK)
    later = renderer.extend(ASK, prompt, said, [SHOWN])
    assert later[: len(prompt) + len(ids) + 1] == prompt + said.token_ids


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, TWO_ROLES_TEMPLATE, THINK_TEMPLATE, BOS_TEMPLATE])
async def test_under_any_template_a_demonstration_trains_exactly_what_was_said(
    desk: Taskset, make_tokenizer: TokenizerMaker, template: str
) -> None:
    from evergrad.rollouts import scripted

    renderer = Renderer(make_tokenizer(template))
    for task in desk.tasks("train", 5, seed=2):
        texts = desk.open(task).demonstrate()
        assert texts is not None
        rollout = await run_rollout(
            task, desk, scripted(texts, renderer), renderer, Sampling(), rollout_id="r", group_id="g", source="demonstration"
        )
        assert rollout.reward == 1.0, rollout.fault
        samples = assign_advantages(RolloutGroup("g", (rollout,)), "constant")
        trained = [token for each in samples for token, mask in zip(each.token_ids, each.loss_mask, strict=True) if mask]
        assert trained == [token for text in texts for token in renderer.reply(text)]
