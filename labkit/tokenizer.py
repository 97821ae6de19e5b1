"""Text to token ids and back, whole or as a stream, and conversations by the model's own template."""

from __future__ import annotations

import codecs
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of one model.

    Args:
        backend: the byte-pair encoder.
        settings: content of `tokenizer_config.json`: names of control tokens and the chat template.
        stop_ids: further ids that end an answer, beside the end token that `settings` names.

    Raises:
        ValueError: `settings` names a token that `backend` does not have, or its vocabulary is of an unknown kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any],
                 stop_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        # Whether control tokens are recognised is a switch of the shared backend, so each call holds it.
        self._lock = Lock()
        # SentencePiece puts a space in front of every text, which decoding takes away again.
        self.drops_first_space = _is_sentencepiece(backend)
        self._bytes = _token_bytes(backend, sentencepiece=self.drops_first_space)
        self._control = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        names = {name: _token_text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
        self._names = {f"{name}_token": text or "" for name, text in names.items()}
        self.bos_id = _id_of(backend, names["bos"])
        self.eos_id = _id_of(backend, names["eos"])
        ends = ([] if self.eos_id is None else [self.eos_id]) + list(stop_ids)
        self.stop_ids = tuple(dict.fromkeys(ends))
        self.vocab_size = max(self._bytes) + 1
        self.chat_template = _default_template(settings.get("chat_template"))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a folder in Hugging Face's layout.

        Args:
            folder: holds `tokenizer.json`, and if the model has them `tokenizer_config.json`, `chat_template.jinja`
                and `generation_config.json`.

        Raises:
            ValueError: `tokenizer.json` is missing or damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json; download the model again")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises plain Exception whatever the damage.
        except Exception as error:
            raise ValueError(f"{path} is not a readable tokenizer ({error}); download the model again") from error
        settings = _read_json(folder / "tokenizer_config.json")
        if (folder / "chat_template.jinja").is_file():
            settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        ends = _read_json(folder / "generation_config.json").get("eos_token_id")
        return cls(backend, settings, [] if ends is None else [ends] if isinstance(ends, int) else ends)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any text.
            special: recognise control tokens such as `<|im_end|>` in the text, and put the token in front that the
                model expects at the start, if it has one. Without it the text is only text, so a user cannot
                smuggle in the end of a message.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        return self._ids(text, special=special, add=special)

    def _ids(self, text: str, *, special: bool, add: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ValueError(
                f"the text has {half!r} at {error.start}, half of a character; give whole ones, in UTF-8"
            ) from error
        with self._lock:
            self._backend.encode_special_tokens = not special
            return list(self._backend.encode(text, add_special_tokens=add).ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Turn token ids into text; bytes that are no valid UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: show control tokens, which otherwise give no text.

        Raises:
            ValueError: an id that the vocabulary does not have.
        """
        stream = StreamDecoder(self, special=special)
        return "".join([*(stream.feed(index) for index in ids), stream.finish()])

    def token_bytes(self, index: int, *, special: bool = False) -> bytes:
        """Return the bytes that one token stands for; arguments and errors as in `decode`."""
        index = operator.index(index)
        if index not in self._bytes:
            raise ValueError(f"token id {index} is not in the vocabulary of {self.vocab_size} tokens")
        return b"" if index in self._control and not special else self._bytes[index]

    def vocabulary_bytes(self, size: int | None = None) -> list[bytes | None]:
        """Return the bytes of every token, by id: what decoding it adds to a text.

        Args:
            size: number of ids, if the model has more of them than the tokenizer.

        Returns:
            None for control tokens, and for ids that the tokenizer doesn't have.

        Raises:
            ValueError: `size` is below the tokenizer's own number of ids.
        """
        size = self.vocab_size if size is None else size
        if size < self.vocab_size:
            raise ValueError(f"size must be at least the vocabulary's {self.vocab_size}, got {size}")
        return [None if index in self._control else self._bytes.get(index) for index in range(size)]

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Turn a conversation into token ids by the model's chat template.

        The template writes every control token itself, so none is put in front: a second start token would shift all
        positions by one.

        Args:
            messages: each with the entries `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's answer.

        Raises:
            ValueError: the model has no template, the template refuses the messages, or a text as in `encode`.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt)
        return self._ids(text, special=True, add=False)

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text that `chat` encodes; arguments and errors as there."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it plain text through encode()")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"message {index} must be a mapping with 'role' and 'content', got {message!r}")
        # Templates come with models from strangers: they are run in jinja's sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._names)
        # A template adds strings to whatever the message holds, so a wrong type fails inside it.
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of the model refused the messages: {error}") from error


class StreamDecoder:
    """Text of a token stream, piece by piece, never half a character.

    The pieces put together are exactly `tokenizer.decode` of all the ids.

    Args:
        tokenizer: of the model that makes the tokens.
        special: show control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def feed(self, index: int) -> str:
        """Take the next token id and return the text it completes, which may be empty; errors as `decode`."""
        data = self._tokenizer.token_bytes(index, special=self._special)
        if data and self._at_start:
            self._at_start = False
            if self._tokenizer.drops_first_space:
                data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """End the stream: return U+FFFD for a character left unfinished, and be ready for another stream."""
        rest = self._utf8.decode(b"", final=True)
        self._at_start = True
        return rest


def write_tokenizer(folder: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into an existing folder."""
    backend.save(str(folder / "tokenizer.json"))
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _token_bytes(backend: tokenizers.Tokenizer, *, sentencepiece: bool) -> dict[int, bytes]:
    """Return the bytes of every token, by its id.

    Two spellings of bytes exist: GPT-2's, with one printable character per byte, and SentencePiece's, with text that
    marks spaces by U+2581 and unknown bytes by `<0x0A>`.
    """
    byte_of = {} if sentencepiece else _bytes_of_characters()
    table = {}
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        if sentencepiece:
            table[index] = _sentencepiece_bytes(token)
        elif all(character in byte_of for character in token):
            table[index] = bytes(byte_of[character] for character in token)
        else:
            table[index] = token.encode("utf-8")
    for index, added in backend.get_added_tokens_decoder().items():
        table[index] = added.content.encode("utf-8")
    return table


def _is_sentencepiece(backend: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
    if "ByteLevel" not in steps and "ByteFallback" not in steps:
        raise ValueError(f"only byte-level and SentencePiece vocabularies are supported; this tokenizer decodes by "
                         f"{', '.join(steps) or 'no rule'}")
    return "ByteFallback" in steps


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(0x100) if value not in printable]
    return {chr(value): value for value in printable} | {chr(0x100 + n): value for n, value in enumerate(others)}


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode("utf-8")


def _token_text(entry: Any) -> str | None:
    """A token in the settings is a string, or an object that holds it among its options."""
    return entry.get("content") if isinstance(entry, Mapping) else entry


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    if token is None:
        return None
    index = backend.token_to_id(token)
    if index is None:
        raise ValueError(f"the tokenizer's settings name the token {token!r}, which its vocabulary does not have")
    return index


def _default_template(entry: Any) -> str | None:
    """Some models have several templates; the one for plain conversations is called `default`."""
    if isinstance(entry, list):
        return {named["name"]: named["template"] for named in entry}.get("default")
    return entry


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}; download the model again")
    return content


def _to_json(value: Any, indent: int | None = None) -> str:
    """The `tojson` of chat templates, which unlike jinja's own leaves `<` and `>` as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
