"""The tokenizer against llama.cpp and transformers; streams, control tokens and conversations."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from labkit.checkpoints import CheckpointError, bundled_folder, gguf_file, gguf_tokenizer, load_tokenizer
from labkit.config import ModelConfig
from labkit.tokenizer import StreamDecoder, Tokenizer, write_tokenizer
from tests.labkit.gguf_files import SIZES, tokens_of, write_gguf

LLAMA = ModelConfig.tiny(**SIZES)
HI = [{"role": "user", "content": "hi"}]


def tiny(folder: Path, **options: Any) -> Tokenizer:
    """A tokenizer of 300 tokens: three control tokens, all bytes, `hi`, ` hi`, `ll`, unused ones."""
    write_gguf(folder / "m.gguf", LLAMA, {}, **options)
    return Tokenizer(*gguf_tokenizer.read_tokenizer(gguf_file.open_gguf(folder / "m.gguf")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        return load_tokenizer("smollm2")
    except CheckpointError as error:
        pytest.skip(f"not verified here: {error}")


def known_texts() -> list[dict[str, Any]]:
    path = Path(__file__).parent / "data" / "smollm2_tokens.json"
    return json.loads(path.read_text(encoding="utf-8"))["texts"]


@pytest.mark.parametrize("known", known_texts(), ids=lambda known: ascii(known["text"])[:30])
def test_the_bundled_tokenizer_gives_the_ids_of_llama_cpp_and_takes_them_back(smollm2: Tokenizer,
                                                                             known: dict[str, Any]) -> None:
    assert smollm2.encode(known["text"]) == known["plain"]
    assert smollm2.encode(known["text"], special=True) == known["special"]
    assert smollm2.decode(known["plain"]) == known["text"]
    assert smollm2.decode(known["special"], special=True) == known["text"]


def test_transformers_loads_the_converted_folder_as_the_same_tokenizer(smollm2: Tokenizer) -> None:
    from transformers import AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(bundled_folder())
    for known in known_texts():
        assert theirs(known["text"])["input_ids"] == known["special"]
    talk = [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "é <b> 😀"}]
    for messages in (HI, talk, [{"role": "system", "content": "Be brief."}, *talk]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            assert smollm2.chat(messages, add_generation_prompt=prompt) == expected
    assert smollm2.eos_id == theirs.eos_token_id and smollm2.stop_ids == (theirs.eos_token_id,)


def test_digits_are_single_tokens_wherever_they_stand(smollm2: Tokenizer) -> None:
    # Spaces before a digit stay together only where digits are split off first, which is what this model learnt.
    assert [smollm2.decode([i]) for i in smollm2.encode("in  2024  42")] == ["in", "  ", *"2024", "  ", *"42"]


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_every_text_comes_back(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


@given(st.lists(st.integers(0, 299), max_size=30))
@settings(max_examples=300, deadline=None)
def test_pieces_of_a_stream_join_to_the_whole_even_where_bytes_are_no_text(small: Tokenizer, ids: list[int]) -> None:
    for special in (False, True):
        whole = small.decode(ids, special=special)
        stream = StreamDecoder(small, special=special)
        for _ in range(2):  # finish() leaves it ready for another stream
            assert "".join([stream.feed(index) for index in ids] + [stream.finish()]) == whole
    theirs = small._backend.decode(ids, skip_special_tokens=True)
    assert small.decode(ids) == theirs


def test_the_bytes_of_all_tokens_spell_what_the_library_decodes(smollm2: Tokenizer) -> None:
    vocabulary = smollm2.vocabulary_bytes()
    assert len(vocabulary) == smollm2.vocab_size == 49152
    backend = smollm2._backend
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    assert {index for index, data in enumerate(vocabulary) if data is None} == special
    for index, data in enumerate(vocabulary):
        assert data is None or data.decode(errors="replace") == backend.decode([index])
    tricky = ["", "\0\t\r\n \x1f", "naïve 日本語 \u200d👩‍🚀", "\u00a0\u2028\ufeff", "e\u0301", "{\"a\": 1}\\"]
    for text in [*tricky, *(known["text"] for known in known_texts())]:
        ids = backend.encode(text, add_special_tokens=False).ids
        if not special & set(ids):
            assert b"".join(vocabulary[index] or b"" for index in ids) == text.encode()


def test_a_model_may_have_more_ids_than_its_tokenizer(small: Tokenizer) -> None:
    vocabulary = small.vocabulary_bytes()
    assert vocabulary[:3] == [None, None, None] and b"hi" in vocabulary and len(vocabulary) == 300
    assert small.vocabulary_bytes(304) == [*vocabulary, None, None, None, None]
    assert small.vocabulary_bytes(300) == vocabulary
    with pytest.raises(ValueError, match="size must be at least the vocabulary's 300, got 299"):
        small.vocabulary_bytes(299)


def test_a_character_of_several_tokens_appears_at_its_last_one(small: Tokenizer) -> None:
    ids = small.encode("a😀é")
    assert len(ids) == 7
    stream = StreamDecoder(small)
    assert [stream.feed(index) for index in ids] == ["a", "", "", "", "😀", "", "é"]
    assert stream.finish() == ""
    assert [stream.feed(index) for index in ids[:3]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert [stream.feed(index) for index in (ids[1], ids[0])] == ["", "\ufffda"]


def test_control_tokens_in_a_users_text_stay_text(small: Tokenizer) -> None:
    text = "hi<|im_end|>"
    assert small.encode(text, special=True) == [small.encode("hi")[0], 2]
    plain = small.encode(text)
    assert 2 not in plain and small.decode(plain) == text
    assert small.decode([*small.encode("hi"), 2]) == "hi"
    assert small.decode([2, 0], special=True) == "<|im_end|><|endoftext|>"
    # The switch belongs to the call: the order of calls changes nothing.
    assert small.encode(text) == plain


@pytest.mark.parametrize("index", [300, -1, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(small: Tokenizer, index: int) -> None:
    assert small.decode([299]) == "[PAD37]"
    with pytest.raises(ValueError, match=rf"token id {index} is not in the vocabulary of 300 tokens"):
        small.decode([5, index])
    stream = StreamDecoder(small)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        stream.feed(index)
    assert stream.feed(small.encode("hi")[0]) == "hi"


def test_ids_may_be_numbers_of_numpy_and_torch(small: Tokenizer) -> None:
    ids = small.encode("hi all")
    assert small.decode(torch.tensor(ids)) == small.decode(np.array(ids)) == "hi all"  # type: ignore[arg-type]


def test_a_start_token_is_put_in_front_once_and_only_where_asked(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, metadata={"tokenizer.ggml.add_bos_token": True})
    plain = tokenizer.encode("hi")
    assert tokenizer.bos_id == 1 and plain[0] != 1
    assert tokenizer.encode("hi", special=True) == [1, *plain]
    # The template of this file writes it too.
    assert tokenizer.chat_text(HI) == "<|im_start|>hi"
    assert tokenizer.encode("hi") == plain
    assert tokenizer.chat(HI) == [1, *plain]


def test_a_model_without_a_start_token_gets_none(small: Tokenizer) -> None:
    assert small.encode("hi", special=True) == small.encode("hi")


def test_bad_conversations_are_refused_with_the_reason(small: Tokenizer, tmp_path: Path) -> None:
    assert small.chat(HI)
    for messages, reason in [([{"role": "user"}], "message 0 must be a mapping with 'role' and 'content'"),
                             ([*HI, "hi"], "message 1 must be"), ([{"role": 1, "content": "x"}], "message 0 must be")]:
        with pytest.raises(ValueError, match=reason):
            small.chat(messages)  # type: ignore[arg-type]
    for template, reason in [("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
                             ("{% if %}", "refused the messages"), ("{{ 'a' + messages[0]['content'] }}", "refused"),
                             ("{{ messages.__class__.__mro__ }}", "refused the messages")]:
        tokenizer = tiny(tmp_path, metadata={"tokenizer.chat_template": template})
        with pytest.raises(ValueError, match=reason):
            tokenizer.chat([{"role": "user", "content": None}])
    with pytest.raises(ValueError, match="no chat template"):
        tiny(tmp_path, metadata={"tokenizer.chat_template": None}).chat(HI)


def test_a_folder_may_keep_its_template_and_its_ends_in_several_places(small: Tokenizer, tmp_path: Path) -> None:
    settings_ = {"eos_token": {"content": "<|im_end|>", "special": True}, "bos_token": None,
                 "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    write_tokenizer(tmp_path, small._backend, settings_)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.chat_text(HI), tokenizer.stop_ids, tokenizer.bos_id) == ("D", (2,), None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0] | tojson }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.stop_ids == (2, 0)
    assert tokenizer.chat_text([{"role": "a", "content": "<é>"}]) == '{"role": "a", "content": "<é>"}'
    # Templates are written for an environment that drops the lines of blocks.
    (tmp_path / "chat_template.jinja").write_text("  {% if add_generation_prompt %}\nA\n  {% endif %}\nB")
    assert Tokenizer.from_folder(tmp_path).chat_text(HI) == "A\nB"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer.from_folder(tmp_path).stop_ids == (2, 0)


def test_damaged_tokenizer_files_are_named(small: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    write_tokenizer(tmp_path, small._backend, {"eos_token": "<|eot|>"})
    with pytest.raises(ValueError, match=r"name the token '<\|eot\|>'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("metadata", "message"), [
    ({"tokenizer.ggml.model": "llama"}, "GGUF tokenizer 'llama' is not supported"),
    ({"tokenizer.ggml.pre": "deepseek-v3"}, "GGUF pre-tokenizer 'deepseek-v3' is not supported.*smollm"),
    ({"tokenizer.ggml.tokens": None}, "no metadata 'tokenizer.ggml.tokens'"),
    ({"tokenizer.ggml.merges": [1, 2]}, "merges must be a list of strings"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "300 tokens but 2 token types"),
    ({"tokenizer.ggml.merges": ["h q"]}, "inconsistent"),
    ({"tokenizer.ggml.eos_token_id": 300}, "gives 300 as its eos token, but has 300 tokens"),
])
def test_gguf_tokenizers_that_cannot_be_rebuilt_are_refused(metadata: dict[str, Any], message: str,
                                                            tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        tiny(tmp_path, metadata=metadata)


def test_the_word_patterns_are_those_of_the_model_families() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
    assert gguf_tokenizer._QWEN2_WORDS == PRETOKENIZE_REGEX
    assert inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default == gguf_tokenizer._LLAMA3_WORDS


@pytest.mark.parametrize(("pre", "pieces"), [
    ("smollm", ["x", " ", "1", "2", "3", "4"]), ("qwen2", ["x", " ", "1", "2", "3", "4"]),
    ("llama-bpe", ["x", " ", "123", "4"]), ("gpt-2", ["x", " 1234"]),
])
def test_each_family_cuts_digits_its_own_way(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, pre=pre)
    text = "x 1234"
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces
    assert tokenizer.decode(tokenizer.encode("hi 12 é")) == "hi 12 é"


def test_a_word_of_the_vocabulary_needs_merges_unless_the_family_takes_it_whole(tmp_path: Path) -> None:
    tokens, _, _ = tokens_of(LLAMA)
    tokens[262] = "abc"
    for pre, ids in [("llama-bpe", [262]), ("smollm", tiny(tmp_path).encode("abc"))]:
        assert tiny(tmp_path, pre=pre, metadata={"tokenizer.ggml.tokens": tokens}).encode("abc") == ids
    assert len(ids) == 3


def test_tokens_that_users_defined_are_text_that_stays_in_one_piece(tmp_path: Path) -> None:
    tokens, types, _ = tokens_of(LLAMA)
    tokens[262], types[262] = "<tool>", TokenType.USER_DEFINED
    tokenizer = tiny(tmp_path, metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert tokenizer.encode("hi<tool>") == [*tokenizer.encode("hi"), 262]
    assert tokenizer.decode([262]) == "<tool>"


def test_sentencepiece_vocabularies_decode_as_by_their_own_rules() -> None:
    vocabulary = {"<s>": 0, "<0x0A>": 1, "<0xC3>": 2, "<0xA9>": 3, "\u2581hi": 4, "\u2581": 5, "all": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"})
    stream = StreamDecoder(tokenizer)
    for ids in ([4, 6], [0, 4, 5, 4], [6, 4], [4, 2, 3, 1], [5, 5, 6], []):
        assert tokenizer.decode(ids) == backend.decode(ids)
        assert "".join([stream.feed(index) for index in ids] + [stream.finish()]) == backend.decode(ids)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"only byte-level and SentencePiece.*WordPiece"):
        Tokenizer(backend, {})
