"""The parts by themselves: blocks as a model says, draws as the distribution says, sessions, text that is never taken back."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from evergrad.inference._attention import plan_step
from evergrad.inference._blocks import BlockPool, OutOfBlocks
from evergrad.inference._drafts import Drafter, Guess, Lookup, share_out
from evergrad.inference._grammar import Grammars
from evergrad.inference._linear import PackedLinear, can_pack, pack
from evergrad.inference._lockstep import Lockstep
from evergrad.inference._rows import Distribution, Row, Sample
from evergrad.inference._sampling import Draws
from evergrad.inference._schedule import Chunk
from evergrad.inference._text import TextStream, TokenText
from evergrad.inference._tools import CallFormat
from evergrad.types import Sampling
from tests.inference.conftest import VOCABULARY


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_are_found_by_content_and_never_lost(data: st.DataObject) -> None:
    """Rows come and go; whatever the pool says a block holds was written by someone, and every block is accounted for."""
    size = data.draw(st.integers(1, 4))
    pool = BlockPool(num_blocks=12, block_size=size)
    content: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[tuple[int, ...], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "add", "drop", "forget"]))
        if action == "forget" and data.draw(st.booleans()):
            pool.forget_all()
        elif action == "drop" and rows:
            pool.drop(rows.pop(data.draw(st.integers(0, len(rows) - 1)))[1])
        elif action == "add":
            tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14)))
            match = pool.match(tokens)
            hit = len(match.blocks) * size + match.tail_tokens
            assert hit < len(tokens)
            for place, block in enumerate(match.blocks):
                assert content[block] == tokens[: (place + 1) * size]
            if match.tail is not None:
                prefix = tokens[:hit]
                assert content[match.tail][:hit] == prefix
            blocks, chain = list(match.blocks), match.chain
            try:
                for start in range(len(blocks) * size, len(tokens), size):
                    block = pool.take()
                    blocks.append(block)
                    part = tokens[start : start + size]
                    content[block] = tokens[: start + len(part)]
                    chain = pool.remember(chain, part, block, written=data.draw(st.booleans()))
            except OutOfBlocks:
                pool.drop(blocks)
            else:
                rows.append((tokens, blocks))
            pool.written()
        held = {block for _, blocks in rows for block in blocks}
        assert pool.available == 12 - len(held)
        assert all(block < 12 for block in held)


def test_forgetting_makes_the_order_of_blocks_that_of_the_start() -> None:
    pool = BlockPool(6, 2)
    blocks = [pool.take() for _ in range(6)]
    pool.drop([blocks[3], blocks[1], blocks[5], blocks[0], blocks[2], blocks[4]])
    pool.forget_all()
    assert [pool.take() for _ in range(6)] == blocks


def all_logprobs(draws: Draws, row: int, vocabulary: int) -> torch.Tensor:
    return torch.tensor(draws.logprobs([row] * vocabulary, range(vocabulary)), dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [40, 128, 300])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0)) * 1.5
    draws = Draws(logits, [Distribution(0.7, 1.0, 0), Distribution(1.0, 0.8, 0), Distribution(1.3, 1.0, 6)])
    plain = torch.log_softmax(logits[0].double() / 0.7, dim=-1)
    assert torch.allclose(all_logprobs(draws, 0, vocabulary), plain, atol=1e-5)
    for row in range(3):
        uniforms = []
        for seed in range(8000):
            sample = Sample("r", 0, Sampling(), seed, (0, "", 0, 0))
            sample.token_ids = [0] * (seed % 7)
            uniforms.append(sample.uniform())
        counts = Counter(draws.draw([row] * len(uniforms), uniforms))
        probabilities = all_logprobs(draws, row, vocabulary).exp()
        assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)
        expected = probabilities * len(uniforms)
        assert all(expected[token] > 0 for token in counts)
        likely = [token for token in range(vocabulary) if expected[token] >= 5]
        rest = sum(counts[token] for token in range(vocabulary) if token not in likely)
        observed = [counts[token] for token in likely] + [rest]
        wanted = [float(expected[token]) for token in likely]
        wanted.append(len(uniforms) - sum(wanted))
        if wanted[-1] < 1.0:
            observed, wanted = observed[:-1], wanted[:-1]
        scale = sum(observed) / sum(wanted)
        assert chisquare(observed, [value * scale for value in wanted]).pvalue > 1e-4


@given(st.integers(1, 150), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_packed_layer_is_the_linear_one_for_any_number_of_rows(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(inputs, outputs, bias)
    if not can_pack(layer.weight):
        pytest.skip("nothing is packed without MKL")
    input = torch.randn(1, rows, inputs)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(
            input.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        (packed,) = PackedLinear.replace([layer], pack(layer.weight))
        assert torch.allclose(packed(input).double(), expected, atol=1e-5)
        # Other rows beside them change nothing but the rounding.
        assert torch.allclose(packed(torch.cat([input, input], dim=1))[:, :rows].double(), expected, atol=1e-5)


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 2**32), st.sampled_from([5, 128, 257]))
@settings(max_examples=200, deadline=None)
def test_a_draw_is_the_first_token_above_its_uniform(uniform: float, seed: int, vocabulary: int) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 8
    draws = Draws(logits, [Distribution(0.5, 0.9, 11)])
    probabilities = all_logprobs(draws, 0, vocabulary).exp()
    for value in (uniform, math.nextafter(1.0, 0.0), 0.0):
        (token,) = draws.draw([0], [value])
        assert probabilities[token] > 0
        below = float(probabilities[:token].sum())
        assert below - 1e-5 <= value <= below + float(probabilities[token]) + 1e-5


def test_top_k_and_top_p_keep_the_first_of_equals() -> None:
    draws = Draws(torch.zeros(2, 8), [Distribution(1.0, 1.0, 3), Distribution(1.0, 0.25, 0)])
    assert [int(torch.isfinite(all_logprobs(draws, row, 8)).sum()) for row in (0, 1)] == [3, 2]


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    draws = Draws(logits, [Distribution(0.0, 1.0, 0), Distribution(1.0, 1.0, 0)] * 2)
    tokens = draws.draw([0, 1, 2, 0], [0.99, 0.5, 0.0, 0.1])
    assert [tokens[0], tokens[2], tokens[3]] == logits[[0, 2, 0]].argmax(dim=-1).tolist()
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert draws.logprobs([0], tokens[:1]) == pytest.approx([float(expected[0, tokens[0]])], abs=1e-5)


def test_rows_without_a_distribution_are_told_apart() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    logits[2, 1] = float("inf")
    assert Draws(logits, [Distribution(1.0, 1.0, 0)] * 4).usable == [False, False, False, True]


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(16, 2).t()
    kept = logits.clone()
    Draws(logits, [Distribution(0.5, 0.9, 3), Distribution(1.0, 1.0, 0)]).draw([0, 1], [0.3, 0.4])
    assert torch.equal(logits, kept)


def test_guesses_follow_the_longest_context_and_the_own_row_first() -> None:
    drafter, own = Drafter(max_length=5), Lookup()
    drafter.learn([1, 2, 3, 4, 5, 6, 7], 0)
    own.learn([9, 3, 4, 8, 8, 3, 4], 0)
    guess = drafter.guess(own, [9, 3, 4], limit=5)
    assert guess is not None
    assert (guess.tokens[0], guess.evidence) == (8, ("row", 3))
    guess = drafter.guess(Lookup(), [2, 3, 4], limit=5)
    assert guess is not None
    assert (guess.tokens[0], guess.evidence) == (5, ("any", 3))
    for _ in range(200):
        drafter.outcome(guess, True)
    sure = drafter.guess(Lookup(), [1, 2, 3, 4], limit=2)
    assert sure is not None
    assert sure.tokens == (5,) or sure.tokens == (5, 6)
    assert drafter.guess(Lookup(), [50, 60], limit=5) is None
    drafter.forget()
    assert drafter.guess(Lookup(), [2, 3, 4], limit=5) is None


def test_room_goes_to_the_likeliest_guesses() -> None:
    guesses = {
        0: Guess((1, 2, 3), (0.9, 0.8, 0.7), ("row", 4)),
        1: Guess((1, 2), (0.85, 0.4), ("row", 3)),
        2: Guess((1,), (0.1,), ("any", 2)),
    }
    assert share_out(guesses.items(), 0) == {}
    assert share_out(guesses.items(), 3) == {0: 2, 1: 1}
    assert share_out(guesses.items(), 100) == {0: 3, 1: 2}


def test_lockstep_waits_for_all_and_lets_go_of_one_that_does_not_come() -> None:
    lockstep = Lockstep(hold_s=5.0)
    assert lockstep.wait_s(0.0) == 0.0
    lockstep.open(["a", "b"], 10.0)
    lockstep.asked(None)
    lockstep.asked("stranger")
    assert lockstep.wait_s(10.0) == 5.0
    lockstep.asked("a")
    lockstep.asked("b")
    assert lockstep.wait_s(11.0) == 0.0
    lockstep.answered("a", 12.0)
    assert lockstep.wait_s(13.0) == pytest.approx(4.0)
    assert lockstep.num_misses == 0
    assert lockstep.wait_s(17.5) == 0.0
    assert lockstep.num_misses == 1
    # Not waited for again, and not counted again, before it asks.
    assert lockstep.wait_s(18.0) == 0.0
    assert lockstep.num_misses == 1
    lockstep.asked("a")
    lockstep.answered("a", 20.0)
    assert lockstep.wait_s(20.0) == 5.0
    lockstep.close(["a"])
    assert lockstep.wait_s(20.0) == 0.0


class _Letters:
    """Two tokens make one letter of two bytes; the others are letters themselves."""

    def text_of(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(min_size=0, max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_make_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    if "\ufffd" in text:
        return
    stream = TextStream(_Letters(), stops)  # type: ignore[arg-type]
    pieces = []
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    if not stream.stopped:
        pieces.append(stream.finish())
    # The stop that is complete first decides; among those complete at once, the one that began first.
    heads = (text[:length] for length in range(len(text) + 1))
    cuts = ([head.find(stop) for stop in stops if stop in head] for head in heads)
    first = next((cut for cut in cuts if cut), None)
    assert "".join(pieces) == (text if first is None else text[: min(first)])


def kept_by_definition(logits: torch.Tensor, one: Distribution) -> torch.Tensor:
    """Min-p, then top-k, then top-p, each by its definition, token by token in the order of probability; float64, [V] bool."""
    probabilities = torch.softmax(logits.double() / one.temperature, dim=-1)
    order = [token for token in probabilities.argsort(descending=True, stable=True).tolist() if torch.isfinite(logits[token])]
    order = [token for token in order if probabilities[token] >= one.min_p * probabilities[order[0]]]
    order = order[: one.top_k or None]
    left = float(probabilities[order].sum())
    kept: list[int] = []
    for token in order:
        if kept and one.top_p < 1.0 and float(probabilities[kept].sum()) / left >= one.top_p:
            break
        kept.append(token)
    return torch.isin(torch.arange(len(logits)), torch.tensor(kept))


@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 40, 200]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([1.0, 0.9, 0.4]),
    st.sampled_from([0, 1, 7]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_cut_is_what_the_definitions_say(
    seed: int, vocabulary: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocabulary, generator=generator) * 3
    allowed = torch.rand(vocabulary, generator=generator) < 0.5
    allowed[0] = True
    one = Distribution(temperature, top_p, top_k, min_p)
    draws = Draws(logits, [one, one], {1: allowed})
    for row, scores in enumerate((logits[0], logits[1].masked_fill(~allowed, float("-inf")))):
        kept = kept_by_definition(scores, one)
        found = all_logprobs(draws, row, vocabulary)
        assert torch.equal(torch.isfinite(found), kept)
        expected = torch.log_softmax((scores.double() / temperature).masked_fill(~kept, float("-inf")), dim=-1)
        assert torch.allclose(found[kept], expected[kept], atol=1e-5)
    (greedy,) = Draws(logits, [Distribution(0.0, 1.0, 0)] * 2, {1: allowed}).draw([1], [0.3])
    assert greedy == int(logits[1].masked_fill(~allowed, float("-inf")).argmax())


@pytest.mark.parametrize("lengths", [[1] * 8, [1, 1, 5, 1], [3]])
def test_rows_that_begin_alike_read_their_beginning_once(lengths: list[int]) -> None:
    """Eight samples of one prompt: its keys and values are gathered once in a step, for all queries of the group."""
    size, shared = 4, list(range(16))
    chunks = []
    for index, length in enumerate(lengths):
        row = Row([0] * (64 + length), 64, Distribution(1.0, 1.0, 0), [], (1, "", 0, index))
        row.add_blocks([*shared, *range(20 + 2 * index, 22 + 2 * index)], size)
        chunks.append(Chunk(row, 64, 64 + length))
    plan = plan_step(chunks, torch.device("cpu"), with_windows=False)
    (call,) = plan.calls
    assert call.shape == (1, sum(lengths), 64 + sum(lengths))
    assert len(set(call.slots.tolist())) == len(call.slots)


@pytest.fixture(scope="module")
def grammars(model_folder: Path) -> Grammars:
    return Grammars(TokenText(model_folder), VOCABULARY, (2,))


def follows(grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether a reply may be ``text``: each of its tokens is among those allowed, and it may end after them."""
    matcher = grammars.start(grammar)
    for token in TokenText(grammars._text.folder).ids_of(text):
        if not matcher.allowed()[token]:
            return False
        matcher.advance([token])
    return matcher.ended or bool(matcher.allowed()[2])


CALL = '{"name": "find", "arguments": {"item": "rope"}}'
WRONG = '{"name": "find", "arguments": {"item": "rake"}}'


@pytest.mark.parametrize(
    ("text", "optional", "required", "single"),
    [
        ("It is <b>there</b>.", True, False, False),
        (f"<tool_call>\n{CALL}\n</tool_call>", True, True, True),
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", True, True, False),
        (f"I look.\n<tool_call>\n{CALL}\n</tool_call>", True, False, False),
        (f"<tool_call>\n{WRONG}\n</tool_call>", False, False, False),
        (f"Hm. <tool_call>\n{CALL}\n</tool_call> <tool_call>\n{WRONG}\n</tool_call>", False, False, False),
        ('<tool_call>\n{"name": "lose", "arguments": {}}\n</tool_call>', False, False, False),
        (f"<tool_call>\n{CALL}", False, False, False),
    ],
)
def test_calls_fit_their_schemas_wherever_they_stand(
    grammars: Grammars, text: str, optional: bool, required: bool, single: bool
) -> None:
    item = {"type": "object", "properties": {"item": {"enum": ["rope", "lamp"]}}, "required": ["item"]}
    tools = [{"function": {"name": "find", "parameters": {**item, "additionalProperties": False}}}]
    form = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")
    free = form.grammar(tools, needed=False, several=True)
    assert free is not None
    assert follows(grammars, free, text) is optional
    assert follows(grammars, form.grammar(tools, needed=True, several=True) or "", text) is required
    assert follows(grammars, form.grammar(tools, needed=True, several=False) or "", text) is single
    bare = CallFormat("", "", "arguments")
    assert bare.grammar(tools, needed=False, several=True) is None
    assert follows(grammars, bare.grammar(tools, needed=True, several=True) or "", text) is False
    assert follows(grammars, bare.grammar(tools, needed=True, several=True) or "", CALL)
