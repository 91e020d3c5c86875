"""Turn text into tokens: bytes, which need nothing, or a tokenizer.json of Hugging Face's `tokenizers` library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.corpus.errors import DataError
from training.runtime import data_roots

Tokens = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]

AUTO, BYTES = "auto", "bytes"
END_OF_BYTES = 255
"""Ends a document of bytes: it occurs in no UTF-8 text, so 256 tokens are enough, with one byte of disk each."""
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")


@dataclass(frozen=True)
class TokenizerId:
    """Identifies the tokenizer of some tokens: two are the same if their digests are."""

    name: str
    sha256: str
    vocabulary: int
    """One more than the largest token."""
    end_of_document: int

    @property
    def label(self) -> str:
        """A short name that is valid in file names."""
        return self.name if self.name == BYTES else f"{self.name}-{self.sha256[:8]}"

    @property
    def dtype(self) -> str:
        """The smallest type that can represent every token."""
        return np.min_scalar_type(self.vocabulary - 1).name


class Tokenizer(Protocol):
    @property
    def id(self) -> TokenizerId: ...

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text, of the id's dtype, without marks for its beginning or end."""
        ...


class ByteTokenizer:
    """Encodes text as its UTF-8 bytes."""

    def __init__(self) -> None:
        description = f"UTF-8 bytes, {END_OF_BYTES} ends a document"
        self.id = TokenizerId(BYTES, hashlib.sha256(description.encode()).hexdigest(), 256, END_OF_BYTES)

    def encode(self, texts: list[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class HuggingFaceTokenizer:
    """Encodes with a tokenizer.json. If it has no end-of-document token, one is added."""

    def __init__(self, path: Path) -> None:
        content = _read(path)
        try:
            import tokenizers  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            message = (
                "needs the library `tokenizers`, which the job's Python does not have. Install it there "
                '(pip install tokenizers), or write "bytes".'
            )
            raise DataError(message, "tokenizer") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            message = f"{path} is not a tokenizer.json that tokenizers {tokenizers.__version__} can read ({error})."
            raise DataError(message, "tokenizer") from None
        self._path = path
        # The file's settings must not truncate or pad documents, nor read `</s>` in a text as the end.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        end = next((vocabulary[name] for name in END_NAMES if name in vocabulary), largest + 1)
        name = path.parent.name if path.name == "tokenizer.json" else path.stem
        self.id = TokenizerId(safe_name(name), hashlib.sha256(content).hexdigest(), max(largest, end) + 1, end)

    def text_of(self, token: int) -> str | None:
        """Return the text of a token; None if the file has no such token."""
        text: str | None = self._tokenizer.id_to_token(token)
        return text

    def number_of(self, text: str) -> int | None:
        """Return the token with this text; None if the file has no such token."""
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    def encode(self, texts: list[str]) -> list[Tokens]:
        try:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # as above
            message = f"{self._path} fails on a text ({error}). Correct it, or name another."
            raise DataError(message, "tokenizer") from None
        return [np.array(encoding.ids, dtype=self.id.dtype) for encoding in encodings]


def load(name: str) -> Tokenizer:
    """Return the tokenizer: `auto` and `bytes` mean bytes, anything else is the path of a file."""
    return ByteTokenizer() if name in (AUTO, BYTES) else HuggingFaceTokenizer(Path(name).expanduser())


def safe_name(name: str) -> str:
    """Convert a name into a part of a folder name: letters, digits, dots, dashes."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name)
    return safe.strip(".-")[:40] or "data"


def _read(path: Path) -> bytes:
    try:
        with data_roots.open_file(path) as file:
            return file.read()
    except OSError as error:
        message = f"{path} can't be read ({error.strerror}). Name a tokenizer.json that the job can read."
        raise DataError(message, "tokenizer") from None
