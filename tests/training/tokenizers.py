"""A tokenizer.json that Hugging Face's library reads, and a stand-in for the library where it is not installed."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

WORDS = ("the", "siskin", "sings", "at", "dawn")


def write_tokenizer(path: Path, *words: str, end: str = "</s>") -> Path:
    """Write a tokenizer with one token per word. It was saved with truncation to 2 tokens, which must be ignored."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", *(words or WORDS)))}
    added = [{"id": len(vocabulary), "content": end, "special": True, **dict.fromkeys(FLAGS, False)}] if end else []
    about: dict[str, Any] = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about))
    return path


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class _Tokenizer:
    """The part of tokenizers.Tokenizer that is used, for a file as above."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._words = about["model"]["vocab"]
        self._added = {token["content"]: token["id"] for token in about["added_tokens"]}
        self._longest: int | None = about["truncation"]["max_length"]
        self.encode_special_tokens = False

    @classmethod
    def from_str(cls, text: str) -> _Tokenizer:
        return cls(json.loads(text))

    def no_truncation(self) -> None:
        self._longest = None

    def no_padding(self) -> None:
        pass

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {**self._words, **(self._added if with_added_tokens else {})}

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        return [types.SimpleNamespace(ids=self._ids(text)[: self._longest]) for text in texts]

    def _ids(self, text: str) -> list[int]:
        if text in self._added and not self.encode_special_tokens:
            return [self._added[text]]
        return [self._words.get(word, 0) for word in re.findall(r"\w+|[^\w\s]+", text)]


def stand_in() -> types.ModuleType:
    module = types.ModuleType("tokenizers")
    module.Tokenizer = _Tokenizer  # type: ignore[attr-defined]
    module.__version__ = "0"  # type: ignore[attr-defined]
    return module
