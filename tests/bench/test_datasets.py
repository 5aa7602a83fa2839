from __future__ import annotations

import json
from pathlib import Path

import pytest

from hex_llm.bench.arguments import client_parser, parse_client
from hex_llm.bench.datasets import Sample, Source, make_samples
from hex_llm.config import EngineConfig
from hex_llm.errors import HexError
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.weights.model_files import open_tokenizer
from hex_llm.weights.source import fetch
from tests.server.fakes import byte_tokenizer

BYTES = byte_tokenizer()


def samples(*argv: str, tokenizer: Tokenizer | None = BYTES, takes_ids: bool = True) -> list[Sample]:
    args = parse_client(client_parser("serve", ""), ["--num-prompts=40", *argv])
    return make_samples(Source(args, tokenizer, takes_ids, BYTES.vocab_size))


@pytest.mark.parametrize("takes_ids", [True, False])
@pytest.mark.parametrize("name", ["random", "chat", "rag", "prefix_repetition"])
def test_made_up_prompts_have_the_lengths_that_they_say(name: str, takes_ids: bool) -> None:
    lengths = [
        "--random-input-len=60",
        "--random-range-ratio=0.5",
        "--random-prefix-len=9",
        "--length-scale=0.05",
    ]
    made = samples(f"--dataset-name={name}", *lengths, takes_ids=takes_ids)
    assert len(made) == 40
    for one in made:
        ids = one.prompt if isinstance(one.prompt, list) else BYTES.encode(one.prompt)
        assert len(ids) == one.prompt_len
        assert 0 <= min(ids) <= max(ids) < BYTES.vocab_size
    assert made[0].prompt != made[1].prompt


def test_text_of_a_real_vocabulary_has_the_length_too() -> None:
    tokenizer = open_tokenizer(fetch(None, cache_dir=EngineConfig().cache_dir), "auto")
    made = samples("--num-prompts=5", "--random-input-len=333", tokenizer=tokenizer, takes_ids=False)
    assert [len(tokenizer.encode(str(one.prompt))) for one in made] == [333] * 5


def test_random() -> None:
    made = samples(
        "--random-input-len=100", "--random-output-len=10", '--random-range-ratio={"input":0.2,"output":0}'
    )
    assert {one.output_len for one in made} == {10}
    lengths = {one.prompt_len for one in made}
    assert 80 <= min(lengths) < max(lengths) <= 120
    again = samples(
        "--random-input-len=100", "--random-output-len=10", '--random-range-ratio={"input":0.2,"output":0}'
    )
    assert [one.prompt for one in made] == [one.prompt for one in again]
    shared = samples("--random-prefix-len=5", "--input-len=7", "--output-len=3", "--seed=2")
    assert len({tuple(one.prompt[:5]) for one in shared}) == 1
    assert {(one.prompt_len, one.output_len) for one in shared} == {(12, 3)}


def test_token_ids_need_no_tokenizer() -> None:
    (one,) = samples("--num-prompts=1", tokenizer=None)
    assert one.prompt_len == len(one.prompt) == 1024


def test_prefix_repetition() -> None:
    made = samples("--dataset-name=prefix_repetition", "--prefix-repetition-num-prefixes=4")
    assert len({tuple(one.prompt[:256]) for one in made}) == 4
    assert len({tuple(one.prompt) for one in made}) == 40
    with pytest.raises(HexError, match="--num-prompts 3 is less than"):
        samples("--dataset-name=prefix_repetition", "--num-prompts=3")


def test_chat_lengths_have_a_mean_and_a_tail() -> None:
    made = samples("--dataset-name=chat", "--num-prompts=2000", tokenizer=None)
    prompts, outputs = [one.prompt_len for one in made], [one.output_len for one in made]
    assert sum(prompts) / 2000 == pytest.approx(420, rel=0.1)
    assert sum(outputs) / 2000 == pytest.approx(220, rel=0.1)
    assert 2500 < max(prompts) <= 8 * 420
    assert 800 < max(outputs) <= 5 * 220


def test_turns_follow_each_other() -> None:
    made = samples("--dataset-name=multi-turn", "--multi-turn-num-conversations=4", "--input-len=10")
    assert [one.follows for one in made[:4]] == [None] * 4
    assert all(one.follows is made[i] for i, one in enumerate(made[4:]))
    assert len({tuple(one.prompt[:1500]) for one in made[:4]}) == 1
    assert all(one.prompt_len == len(one.prompt) for one in made)
    assert all(5 <= one.prompt_len <= 15 for one in made[4:])


def test_a_mixture_keeps_the_order_of_turns() -> None:
    made = samples("--dataset-name=mixture", "--num-prompts=300", "--mix=chat:1,multi-turn:3", tokenizer=None)
    assert len(made) == 300
    turns = [one for one in made if one.follows]
    assert 150 < len(turns) < 200
    assert all(made.index(one.follows) < made.index(one) for one in turns if one.follows)


# ---- files


def test_sharegpt(tmp_path: Path) -> None:
    talks = [("a" * 10, "b" * 20), ("tiny"[:2], "b" * 20), ("a" * 2000, "b"), ("a" * 30, "bb")]
    rows = [{"conversations": [{"value": q}, {"value": a}]} for q, a in talks]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([*rows, {"conversations": [{"value": "alone"}]}, {"id": 3}]))
    file = ["--dataset-name=sharegpt", f"--dataset-path={path}"]
    (one,) = samples(*file, "--no-oversample")
    assert (one.prompt, one.prompt_len, one.output_len) == ("a" * 10, 11, 21)
    assert len(samples(*file, "--sharegpt-output-len=2", "--no-oversample")) == 2
    assert len(samples(*file)) == 40


def test_custom(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "three", "output_tokens": 5}\n')
    file = ["--dataset-name=custom", f"--dataset-path={path}", "--disable-shuffle", "--num-prompts=0"]
    first, _ = made = samples(*file, "--skip-chat-template")
    assert (first.prompt, first.prompt_len, first.output_len) == ("one", 4, 256)
    assert [one.output_len for one in samples(*file, "--custom-output-len=-1")] == [3, 5]
    assert samples(*file)[0].prompt == byte_tokenizer().encode(
        "<user>one<assistant>", add_special_tokens=False
    )
    assert [one.prompt for one in made] == [one.prompt for one in samples(*file, takes_ids=False)]


def test_sonnet() -> None:
    made = samples("--dataset-name=sonnet", "--sonnet-input-len=2000", "--sonnet-prefix-len=400")
    assert all(1600 < one.prompt_len < 2500 and one.output_len == 150 for one in made)
    shared = [str(one.prompt)[:400] for one in made]
    assert len(set(shared)) == 1
    assert "From fairest creatures" in shared[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a JSON list nor JSON lines: .*"),
        ("[]", "no prompt in it can be used"),
        ('{"text": "x"}', "a line lacks a prompt, or output_tokens as a number .*"),
        ("[3]", "a line lacks a prompt.*"),
        (None, "No such file or directory"),
    ],
)
def test_a_broken_file_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(HexError, match=f"^--dataset-path {path}: {message}$"):
        samples("--dataset-name=custom", f"--dataset-path={path}")


def test_a_file_and_a_tokenizer_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(HexError, match="--dataset-name custom: name its file with --dataset-path"):
        samples("--dataset-name=custom")
    with pytest.raises(HexError, match="--dataset-name sharegpt: needs a tokenizer"):
        samples("--dataset-name=sharegpt", tokenizer=None)
    path = tmp_path / "talks.json"
    path.write_text('[{"conversations": 3}]')
    with pytest.raises(HexError, match="its conversations are no lists of turns with a value"):
        samples("--dataset-name=sharegpt", f"--dataset-path={path}")
