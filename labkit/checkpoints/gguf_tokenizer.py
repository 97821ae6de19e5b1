"""The tokenizer inside a GGUF file, rebuilt as the `tokenizer.json` and settings of a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from labkit.checkpoints.errors import CheckpointError
from labkit.checkpoints.gguf_file import metadata

# How words are cut before byte pairs merge. Digits are what differs most: one by one, or up to three together.
_QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def read_tokenizer(reader: GGUFReader) -> tuple[Tokenizer, dict[str, Any]]:
    """Rebuild the tokenizer of an open GGUF file.

    Returns:
        The tokenizer, and the content of the `tokenizer_config.json` that goes with it: names of the control tokens,
        and the chat template if the file has one.

    Raises:
        CheckpointError: a kind of tokenizer other than byte-level BPE, or metadata that is missing or inconsistent.
    """
    kind = metadata(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"GGUF tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2'); "
                              f"give the model's Hugging Face folder instead")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    merges = metadata(reader, "tokenizer.ggml.merges")
    for name, entries in (("tokens", tokens), ("merges", merges)):
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise CheckpointError(f"the GGUF metadata tokenizer.ggml.{name} must be a list of strings; "
                                  f"download it again")
    types = metadata(reader, "tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types; download it again")
    words = metadata(reader, "tokenizer.ggml.pre")
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        model = BPE({token: index for index, token in enumerate(tokens)}, pairs, ignore_merges=words == "llama-bpe")
    # The library raises plain Exception for a merge of tokens that do not exist.
    except Exception as error:
        raise CheckpointError(f"the tokenizer in the GGUF file is inconsistent ({error}); download it again") from error
    tokenizer = Tokenizer(model)
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _word_splitter(words)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            control = token_type == TokenType.CONTROL
            tokenizer.add_tokens([AddedToken(token, special=control, normalized=False)])
    settings = _settings(reader, tokens)
    if settings["add_bos_token"]:
        bos = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokens.index(bos))])
    return tokenizer, settings


def _word_splitter(words: str) -> pre_tokenizers.PreTokenizer:
    if words == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if words == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    patterns = {"qwen2": _QWEN2_WORDS, "llama-bpe": _LLAMA3_WORDS}
    if words not in patterns:
        raise CheckpointError(f"GGUF pre-tokenizer {words!r} is not supported; supported are smollm, gpt-2, "
                              f"{', '.join(patterns)}; give the model's Hugging Face folder instead")
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(patterns[words]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _settings(reader: GGUFReader, tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata(reader, f"tokenizer.ggml.{key}_token_id", None)
        if index is not None:
            if not 0 <= index < len(tokens):
                raise CheckpointError(f"the GGUF file gives {index} as its {key} token, but has {len(tokens)} tokens; "
                                      f"download it again")
            settings[f"{name}_token"] = tokens[index]
    # Files of Llama 3 often leave this out, and llama.cpp then assumes it.
    is_llama3 = metadata(reader, "tokenizer.ggml.pre") == "llama-bpe"
    wants_bos = bool(metadata(reader, "tokenizer.ggml.add_bos_token", is_llama3))
    settings["add_bos_token"] = wants_bos and "bos_token" in settings
    template = metadata(reader, "tokenizer.chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    return settings
