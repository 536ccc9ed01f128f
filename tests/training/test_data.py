"""Data files: every rule that a line can break, and which tokens of a sound one are trained."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evergrad.registry import base_model
from evergrad.training.data import (
    FORMATS,
    Conversation,
    DataConfig,
    DataError,
    Encoder,
    Pair,
    Problem,
    Row,
    Text,
    Tokens,
    examine,
    load_dataset,
    parse,
)
from evergrad.training.data.template import RowRefused
from evergrad.types import InputError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")

ASKED = {"role": "user", "content": "What is 2+2?"}
TOOL = {"type": "function", "function": {"name": "refund", "description": "money back", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "refund", "arguments": '{"order": "K1"}'}}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(base_model("tiny"))


@pytest.fixture
def encoder(tokenizer: Any) -> Callable[[str], Encoder]:
    """An encoder of the tiny model's tokenizer with another template."""

    def made(template: str) -> Encoder:
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return Encoder(changed, "tiny")

    return made


def chat(*said: str, **extra: Any) -> dict[str, Any]:
    """A row of user and assistant by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)], **extra}


def row(data: dict[str, Any], form: str = "chat") -> Row:
    made, problems = parse(1, data, form)
    assert not problems, [each.told("f") for each in problems]
    assert made is not None
    return made


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def trained(encoder: Encoder, made: Row) -> list[str]:
    """The text of each trained stretch of the row's first sequence."""
    sequence = encoder.encode(made)[0]
    return [encoder.decode(sequence.token_ids[start:end]) for start, end, _ in sequence.spans]


# ── Lines and keys ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ('{"messages": [}', "", ["not JSON at column 15"]),
        ("[1, 2]", "", ["must be a JSON object"]),
        ('{"messages": [], "messages": []}', "", ["'messages' twice"]),
        ('{"messages": [{"role": "user", "content": NaN}]}', "", ["NaN is no JSON number"]),
        ('{"text": "\\ud83d"}', "", ["half of a surrogate pair"]),
        ({"mesages": []}, "", ["fit no format", "did you mean 'messages'?"]),
        ({"messages": [], "text": "a"}, "", ["fit no format, or several"]),
        ({"messages": []}, "messages", ["not empty"]),
        ({"messages": "hello"}, "messages", ["'hello'"]),
        ({"messages": [5]}, "messages[0]", ["an object with role and content"]),
        (chat("a", "b", tols=[]), "tols", ["did you mean 'tools'?", "metadata"]),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "messages[0].role", ["did you mean 'assistant'?"]),
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", ["'tool'"]),
        ({"messages": [{**ASKED, "wieght": 1}]}, "messages[0].wieght", ["did you mean 'weight'?"]),
        ({"messages": [{**ASKED, "content": None}]}, "messages[0].content", ["must be text, got null"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["add it"]),
        ({"messages": [{**ASKED, "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", ["type 'text'"]),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "messages[1].content", ["says nothing"]),
        ({"messages": [ASKED]}, "messages", ["nothing to train"]),
        ({"messages": [{**ASKED, "weight": 1}]}, "messages[0].weight", ["'user' are not trained"]),
        ({"messages": [{**ASKED, "role": "assistant", "weight": True}]}, "messages[0].weight", ["a number of 0 or more"]),
        ({"messages": [{**ASKED, "role": "assistant", "weight": -1}]}, "messages[0].weight", ["a number of 0 or more"]),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "messages[0].tool_calls", ["only the assistant"]),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", ["is no tool call"]),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            ["must be a JSON object"],
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "messages[0].tool_call_id", ["'c9'"]),
        (chat("a", "b", tools=[{"name": "f"}]), "tools[0]", ["is no tool"]),
        ({"text": ""}, "text", ["is empty"]),
        ({"prompt": "a", "completion": 4}, "completion", ["must be text as the prompt is"]),
        ({"prompt": 4, "completion": "a"}, "prompt", ["must be text, or a list"]),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "rejected", ["both answers are the same"]),
        (
            {"prompt": [ASKED], "chosen": [{**ASKED, "role": "assistant", "weight": 0.5}], "rejected": []},
            "rejected",
            ["not empty"],
        ),
        (
            {
                "prompt": [ASKED],
                "chosen": [{"role": "assistant", "content": "a", "weight": 0.5}],
                "rejected": [{"role": "assistant", "content": "b"}],
            },
            "weight",
            ["is 0 or 1, got 0.5"],
        ),
        ({"input": [], "preferred_output": [], "non_preferred_output": []}, "input", ["an object with messages"]),
        (
            {"input": {"messages": [ASKED]}, "preferred_output": [], "non_preferred_output": []},
            "preferred_output",
            ["a list of one assistant message"],
        ),
        ({"input_ids": []}, "input_ids", ["not empty"]),
        ({"input_ids": [1, 2.5]}, "input_ids[1]", ["a whole number of 0 or more, got 2.5"]),
        ({"input_ids": [1, True]}, "input_ids[1]", ["got true"]),
        ({"input_ids": [1, -100]}, "input_ids[1]", ["got -100"]),
        ({"input_ids": [1, 2], "labels": [2]}, "labels", ["1 entries for 2 tokens"]),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0]", ["is not the token there, 1", "are not shifted"]),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "labels", ["no token of it would be trained"]),
        ({"input_ids": [1]}, "labels", ["no token of it would be trained"]),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask[1]", ["0 or 1, got 2"]),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask", ["a hole"]),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "attention_mask", ["nothing of the row"]),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "position_ids", ["one sequence a row"]),
        (
            {"prompt": [ASKED, {"role": "assistant", "content": "b"}], "completion": [{"role": "assistant", "content": "c"}]},
            "prompt[1].role",
            ["ends with the assistant"],
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_named(tmp_path: Path, line: Any, field: str, words: list[str]) -> None:
    path = write(tmp_path, "", line)
    found = examine(path)
    problem = found.problems[0] if not field else next(each for each in found.problems if each.field == field)
    told = problem.told(str(path))
    assert problem.line == 2
    assert told.startswith(f"{path}:2: ")
    assert ". Next: " in told
    for word in words:
        assert word in told


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    (problem,) = examine(path).problems
    assert problem.told("x").startswith("x:2: not UTF-8 at byte 11, got b'\\xff\"}\\n'")


def test_one_file_has_one_format(tmp_path: Path) -> None:
    (problem,) = examine(write(tmp_path, chat("a", "b"), {"text": "c"})).problems
    assert "format 'text' in a file of format 'chat'" in problem.told("f")


def test_twenty_problems_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    found = examine(write(tmp_path, *[{"text": ""}] * 31))
    assert (len(found.problems), found.total_problems, found.rows) == (20, 31, 31)


def test_a_file_is_refused_with_its_first_problem(tmp_path: Path, encoder: Callable[[str], Encoder]) -> None:
    path = write(tmp_path, {"text": "a"}, {"text": ""}, {"text": 3})
    with pytest.raises(DataError, match=r"data.jsonl:2\).*1 more: evergrad data check") as refusal:
        load_dataset(str(path), DataConfig(file=str(path)), encoder(CHATML), None, pairs=False)
    assert refusal.value.total == 2


@pytest.mark.parametrize(("text", "words"), [("", "the file is empty"), ("\n\n", "the file is empty")])
def test_an_empty_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    assert words in examine(tmp_path / "data.jsonl").problems[0].told("f")


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data file not found"):
        examine(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="did you mean 'preference'"):
        examine(write(tmp_path, {"text": "a"}), "preferense")


def test_a_byte_order_mark_carriage_returns_and_notes_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a", "id": 7, "metadata": {"from": "b"}}\r\n\r\n{"text": "b"}')
    found = examine(path)
    assert (found.problems, found.rows) == ([], 2)


# ── What a row says ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_formats_are_read() -> None:
    answer = [{"role": "assistant", "content": "4"}]
    other = [{"role": "assistant", "content": "5"}]
    assert row({"text": "a"}, "text").content == Text("", "a")
    assert row({"prompt": "a", "completion": "b"}, "prompt_completion").content == Text("a", "b")
    assert row({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference").content == Pair(Text("a", "b"), Text("a", "c"))
    said, unsaid = Conversation((ASKED, answer[0]), (0.0, 1.0)), Conversation((ASKED, other[0]), (0.0, 1.0))
    assert row({"messages": [ASKED, *answer]}).content == said
    assert row({"prompt": [ASKED], "completion": answer}, "prompt_completion").content == said
    assert row({"prompt": [ASKED], "chosen": answer, "rejected": other}, "preference").content == Pair(said, unsaid)
    openai = {"input": {"messages": [ASKED]}, "preferred_output": answer, "non_preferred_output": other}
    assert row(openai, "preference_openai").content == Pair(said, unsaid)
    assert row({"input_ids": [7, 8], "labels": [-100, 8]}, "tokens").content == Tokens((7, 8), (False, True))
    assert len(FORMATS) == 6


def test_token_ids_are_trained_as_they_are(encoder: Callable[[str], Encoder], tmp_path: Path) -> None:
    padded = {"input_ids": [0, 0, 5, 6, 7, 8, 0], "labels": [-100, -100, 5, -100, 7, 8, -100]}
    rows = [
        {**padded, "attention_mask": [0, 0, 1, 1, 1, 1, 0], "position_ids": [0, 0, 0, 1, 2, 3, 4]},
        {"input_ids": [5, 6, 7]},
    ]
    found = examine(write(tmp_path, *rows))
    assert (found.problems, found.unit, found.lengths, found.trained) == ([], "tokens", [4, 3], [3, 3])
    found = examine(write(tmp_path, *rows), encoder=encoder(CHATML))
    samples = [row[0].sample("f") for row in found.encoded]
    # The first token is predicted by nothing.
    assert [(each.token_ids, each.loss_mask) for each in samples] == [((5, 6, 7, 8), (0, 0, 1, 1)), ((5, 6, 7), (0, 1, 1))]
    found = examine(write(tmp_path, {"input_ids": [5, 10**6]}), encoder=encoder(CHATML))
    assert "input_ids[1]: is no token of the model, got 1000000" in found.problems[0].told("f")


def test_arguments_of_tool_calls_become_objects_and_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    content = row({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [CALL]}]}).content
    assert isinstance(content, Conversation)
    assert content.messages[0]["content"] == "one two"
    assert content.messages[1]["tool_calls"][0]["function"]["arguments"] == {"order": "K1"}


# ── What is trained ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_the_assistant_alone_is_trained_with_its_end_of_turn(encoder: Callable[[str], Encoder], template: str) -> None:
    # The end of turn is the padding token, too, and is trained all the same.
    made = encoder(template)
    assert made.tokenizer.pad_token == "<|im_end|>"
    assert trained(made, row(chat("a", "first", "b", "second"))) == ["first<|im_end|>", "second<|im_end|>"]


def test_weights_become_advantages_and_zero_is_context(encoder: Callable[[str], Encoder]) -> None:
    data = chat("a", "first", "b", "second", "c", "third")
    data["messages"][1]["weight"], data["messages"][3]["weight"] = 0, 0.5
    made = encoder(CHATML)
    assert trained(made, row(data)) == ["second<|im_end|>", "third<|im_end|>"]
    sample = made.encode(row(data))[0].sample("my.jsonl")
    assert sorted(set(sample.advantages)) == [0.0, 0.5, 1.0]
    assert [bool(advantage) for advantage in sample.advantages] == [bool(mask) for mask in sample.loss_mask]
    assert sample.rollout_id == "my.jsonl:1"
    assert set(sample.logprobs) == {0.0}


def test_what_is_trained_is_what_an_engine_would_be_asked(encoder: Callable[[str], Encoder]) -> None:
    made = encoder(CHATML)
    (sequence,) = made.encode(row(chat("a", "\n\nfirst")))
    start, end, _ = sequence.spans[0]
    prompt = made.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)["input_ids"]
    assert list(sequence.token_ids[:start]) == list(prompt)
    assert list(sequence.token_ids[start:end]) == made.tokenizer.encode("\n\nfirst<|im_end|>", add_special_tokens=False)


def test_a_template_that_rewrites_history_is_refused_or_trains_the_last_turn(encoder: Callable[[str], Encoder]) -> None:
    made, data = encoder(FORGETS_THOUGHTS), chat("a", "<think>x</think>first", "b", "<think>y</think>second")
    with pytest.raises(RowRefused, match=r"rewrites the conversation.*character \d+ begins '<think>") as refusal:
        made.encode(row(data))
    assert refusal.value.field == "messages[1]"
    assert "weight 0" in refusal.value.fix
    data["messages"][1]["weight"] = 0
    assert trained(made, row(data)) == ["<think>y</think>second<|im_end|>"]


def test_tools_go_through_the_template(encoder: Callable[[str], Encoder]) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    data = {"messages": [ASKED, called, answered, {"role": "assistant", "content": "Refunded."}], "tools": [TOOL]}
    made = encoder(SHOWS_TOOLS)
    (sequence,) = made.encode(row(data))
    assert '"money back"' in made.decode(sequence.token_ids)
    assert trained(made, row(data)) == ['refund({"order": "K1"})<|im_end|>', "Refunded.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "data", "words"),
    [
        (CHATML, chat("a", "b", tools=[TOOL]), r"tools\[0\].*does not show tools|does not show tools"),
        (CHATML, {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]}, "does not show tool calls"),
        (
            NO_SYSTEM,
            {"messages": [{"role": "system", "content": "Be kind."}, *chat("a", "b")["messages"]]},
            "this text as it is",
        ),
        ("{{ raise_exception('no tools, please') }}", chat("a", "b"), "refuses the roles user, assistant: no tools, please"),
        (MARKED.replace("m.role == 'assistant'", "false"), chat("a", "b"), "marks 0 stretches"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", chat("a", "b"), "shows nothing of it"),
    ],
)
def test_what_the_template_does_not_show_is_refused(
    encoder: Callable[[str], Encoder], template: str, data: dict[str, Any], words: str
) -> None:
    with pytest.raises(RowRefused, match=words):
        encoder(template).encode(row(data))


def test_a_model_without_template_trains_text_only(encoder: Callable[[str], Encoder], tokenizer: Any) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    made = Encoder(plain, "tiny")
    with pytest.raises(RowRefused, match="has no chat template"):
        made.encode(row(chat("a", "b")))
    assert trained(made, row({"text": "hello you"}, "text"))[0].endswith("you<|im_end|>")
    assert trained(made, row({"prompt": "hello", "completion": " you"}, "prompt_completion")) == [" you<|im_end|>"]


def test_a_start_token_is_there_once_and_never_trained(tokenizer: Any) -> None:
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    core.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)])
    both = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    both.chat_template = "{{ bos_token }}" + CHATML
    made = Encoder(both, "both")
    for each in (row(chat("a", "b")), row({"text": "hello"}, "text")):
        (sequence,) = made.encode(each)
        assert list(sequence.token_ids).count(start) == 1
        assert sequence.token_ids[0] == start
        assert sequence.spans[0][0] >= 1


def test_a_tokenizer_that_adds_spaces_is_encoded_as_a_whole() -> None:
    words = ["▁a", "▁b", "▁", "a", "b", "c", "</s>", "<unk>", "[", "]"]
    core = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=7))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    spaced = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    spaced.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    made = Encoder(spaced, "spaced")
    (sequence,) = made.encode(row(chat("c", "a b")))
    whole = spaced.encode("[c] a b</s>", add_special_tokens=False)
    assert list(sequence.token_ids) == whole
    start, end, _ = sequence.spans[0]
    assert spaced.convert_ids_to_tokens(whole[start:end]) == ["▁a", "▁b", "</s>"]


said = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=24).filter(lambda t: t.strip())


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(said, min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_tokens_are_the_template_s_text_and_the_trained_ones_what_the_assistant_said(turns: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model("tiny"))
    if any(special in text for special in tokenizer.all_special_tokens for text in turns):
        return
    made, each = Encoder(tokenizer, "tiny"), row(chat(*turns))
    (sequence,) = made.encode(each)
    assert isinstance(each.content, Conversation)
    rendered = tokenizer.apply_chat_template([dict(m) for m in each.content.messages], tokenize=False)
    assert made.decode(sequence.token_ids) == rendered
    assert trained(made, each) == [f"{text}<|im_end|>" for text in turns[1::2]]


# ── Length ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_overlong_row_is_named_and_done_with_as_told(tmp_path: Path, encoder: Callable[[str], Encoder]) -> None:
    path, made = write(tmp_path, chat("a", "b"), chat("c", "d " * 200)), encoder(CHATML)
    short = len(made.encode(row(chat("a", "b")))[0].token_ids)
    (problem,) = examine(path, "auto", made, 50).problems
    assert problem.told("f").startswith("f:2: ")
    assert "the limit is 50" in problem.told("f")
    left = examine(path, "auto", made, 50, "truncate_left")
    right = examine(path, "auto", made, 50, "truncate_right")
    assert left.truncated == right.truncated == [2]
    assert left.lengths == right.lengths == [short, 50]
    whole = made.encode(row(chat("c", "d " * 200)))[0].token_ids
    assert left.encoded[1][0].token_ids == whole[-50:]
    assert right.encoded[1][0].token_ids == whole[:50]
    assert left.encoded[1][0].spans[0][0] == 1
    dropped = examine(path, "auto", made, 50, "drop")
    assert (dropped.dropped, dropped.lengths) == ([2], [short])


def test_a_row_of_which_nothing_trained_is_left_is_dropped(tmp_path: Path, encoder: Callable[[str], Encoder]) -> None:
    path = write(tmp_path, chat("a", "b"), chat("c " * 200, "d"))
    found = examine(path, "auto", encoder(CHATML), 50, "truncate_right")
    assert (found.dropped, found.truncated) == ([2], [])
    with pytest.raises(DataError, match="all 2 rows are longer than the limit"):
        load_dataset(str(path), DataConfig(file=str(path), overlong="drop"), encoder(CHATML), 2, pairs=False)


def test_a_pair_cut_from_the_left_keeps_one_prompt(tmp_path: Path, encoder: Callable[[str], Encoder]) -> None:
    pair = {"prompt": "a " * 100, "chosen": "b", "rejected": "c " * 20}
    found = examine(write(tmp_path, pair), "auto", encoder(CHATML), 60, "truncate_left")
    chosen, rejected = found.encoded[0]
    start = chosen.spans[0][0]
    assert rejected.spans[0][0] == start
    assert chosen.token_ids[:start] == rejected.token_ids[:start]
    assert (chosen.preference, rejected.preference) == (1, -1)
    samples = [each.sample("f") for each in (chosen, rejected)]
    assert samples[0].group_id == samples[1].group_id == "f:1"
    assert {max(samples[0].advantages), min(samples[1].advantages)} == {1.0, -1.0}


@pytest.mark.parametrize(
    ("pairs", "data", "words"),
    [(True, {"text": "a"}, "'sft'"), (False, {"prompt": "a", "chosen": "b", "rejected": "c"}, "'dpo'")],
)
def test_a_file_of_the_other_method_is_refused(
    tmp_path: Path, encoder: Callable[[str], Encoder], pairs: bool, data: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError, match=f"method = {words}"):
        load_dataset(str(path), DataConfig(file=str(path)), encoder(CHATML), None, pairs=pairs)


def test_a_share_and_a_file_to_hold_out_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="set one of them"):
        DataConfig(file="a", heldout=0.1, heldout_file="b")


def test_problems_of_a_whole_file_have_no_line() -> None:
    assert Problem(0, "", "the file is empty", "", "fill it").told("f") == "f: the file is empty. Next: fill it"
