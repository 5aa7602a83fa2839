from __future__ import annotations

import threading
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from hex_llm.text.tokenizer import Fast, Tokenizer
from tests.server.asking import CHAT, HELLO, JSON, ask, post, refusal
from tests.server.fakes import BOS, EOS, FIRST_BYTE, ByteCodec, FakeBackend, byte_tokenizer

ABC = [FIRST_BYTE + byte for byte in b"abc"]
RENDERED = [FIRST_BYTE + byte for byte in b"<user>hello<assistant>"]


@pytest.mark.parametrize(
    ("body", "tokens", "names"),
    [
        ({"prompt": "abc"}, [BOS, *ABC], None),
        ({"prompt": "abc", "add_special_tokens": False}, ABC, None),
        ({"prompt": "", "model": "any"}, [BOS], None),
        ({"prompt": "abc", "return_token_strs": True}, [BOS, *ABC], ["<s>", "a", "b", "c"]),
        (HELLO[CHAT], RENDERED, None),
        ({**HELLO[CHAT], "add_special_tokens": True}, [BOS, *RENDERED], None),
        ({**HELLO[CHAT], "return_token_strs": True}, RENDERED, list("<user>hello<assistant>")),
    ],
)
def test_tokenize(backend: FakeBackend, body: dict[str, Any], tokens: list[int], names: Any) -> None:
    expected = {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": names}
    assert post(backend, "/tokenize", body) == expected
    assert backend.asked == []


def test_the_template_is_told_whether_an_answer_follows() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    backend = FakeBackend(byte_tokenizer(template))
    assert post(backend, "/tokenize", HELLO[CHAT])["count"] == 6
    assert post(backend, "/tokenize", {**HELLO[CHAT], "add_generation_prompt": False})["count"] == 5


def test_detokenize(backend: FakeBackend) -> None:
    body = {"tokens": [BOS, *ABC, EOS], "model": "any"}
    assert post(backend, "/detokenize", body) == {"prompt": "<s>abc</s>"}
    text = "any text: é€\n"
    tokens = post(backend, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert post(backend, "/detokenize", {"tokens": tokens}) == {"prompt": text}


def test_version(backend: FakeBackend) -> None:
    (version,) = ask(backend, "GET", "/version").json().values()
    assert version[0].isdigit()


def test_tokenizer_info(backend: FakeBackend) -> None:
    info = ask(backend, "GET", "/tokenizer_info").json()
    assert info["chat_template"] == byte_tokenizer().chat_template
    assert (info["bos_token"], info["eos_token_ids"], info["model_max_length"]) == ("<s>", [EOS], 4096)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "truncate": 1}, "truncate"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bodies_that_are_none(backend: FakeBackend, path: str, body: Any, param: str | None) -> None:
    assert refusal(ask(backend, "POST", path, json=body))["param"] == param


def test_half_a_character_is_no_text(backend: FakeBackend) -> None:
    for body in (b'{"prompt": "\\ud800"}', b'{"inputs": "\\ud800"}'):
        reply = ask(backend, "POST", "/tokenize", content=body, headers=JSON)
        assert reply.status_code in (400, 422)
        assert "surrogate" in reply.text


def test_without_a_tokenizer() -> None:
    for method, path, body in (
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/tokenize", HELLO[CHAT]),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", None),
    ):
        assert "tokenizer" in refusal(ask(FakeBackend(), method, path, json=body))["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", HELLO[CHAT]),
        ("/tokenize", {"inputs": "a"}),
        ("/chat_tokenize", HELLO[CHAT]),
    ],
)
def test_tokenizing_is_done_in_other_threads(path: str, body: Any) -> None:
    codec = ByteCodec()
    post(FakeBackend(byte_tokenizer(codec=codec)), path, body)
    assert codec.threads
    assert threading.get_ident() not in codec.threads


# ---- TGI's


def word_tokenizer() -> Tokenizer:
    """A real one of the `tokenizers` library: words, with a token before them."""
    words = {"<s>": 0, "hello": 1, "wörld": 2, "<": 3, "user": 4, ">": 5, "assistant": 6}
    fast = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<s>"))
    fast.add_special_tokens(["<s>"])
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return Tokenizer(Fast(fast), (0,), {"bos_token": "<s>"}, template)


def test_tgis_tokenize_tells_places() -> None:
    backend = FakeBackend(word_tokenizer())
    words = [
        {"id": 1, "text": "hello", "start": 0, "stop": 5},
        {"id": 2, "text": "wörld", "start": 7, "stop": 12},
    ]
    first = {"id": 0, "text": "", "start": 0, "stop": 0}
    assert post(backend, "/tokenize", {"inputs": "hello  wörld"}) == [first, *words]
    assert post(backend, "/tokenize", {"inputs": "hello  wörld", "add_special_tokens": False}) == words


def test_chat_tokenize(backend: FakeBackend) -> None:
    reply = post(backend, "/chat_tokenize", HELLO[CHAT])
    assert reply["templated_text"] == "<user>hello<assistant>"
    assert [one["id"] for one in reply["tokenize_response"]] == RENDERED
    assert "".join(one["text"] for one in reply["tokenize_response"]) == reply["templated_text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": 5}),
        ("/tokenize", {"inputs": "a", "x": 1}),
        ("/chat_tokenize", {"messages": 5}),
    ],
)
def test_tgis_errors(backend: FakeBackend, path: str, body: Any) -> None:
    reply = ask(backend, "POST", path, json=body)
    assert reply.status_code == 422
    assert reply.json()["error_type"] == "validation"
