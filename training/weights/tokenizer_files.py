"""Find the tokenizer files for an exported model, and its special tokens (bos, eos, pad).

The tokenizer.json is searched where the run had it, recognised by the digest in the name of the checkpoint's data, and
copied unchanged with the files next to it. For a run on bytes one is generated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.config.choices import MAX_PATH_CHARACTERS
from training.corpus.errors import DataError
from training.corpus.tokenizer import BYTES, END_OF_BYTES, HuggingFaceTokenizer
from training.manifest import CheckpointError, Manifest
from training.weights import byte_tokenizer
from training.weights.export import recipe_of
from training.weights.weight_files import CONFIG, GENERATION, TOKENIZER, TOKENIZER_COMPANIONS

NONE = "none"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
CLASS = "PreTrainedTokenizerFast"
"""Reads a tokenizer.json as it is. Without a class name transformers uses a Llama's, which changes it."""
MEANINGS = ("bos", "eos", "pad")
MAX_BYTES = 2**30
"""The largest tokenizer.json that is read."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files to write by name, and the ids for the model's config.json."""

    name: str
    contents: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=lambda: {f"{meaning}_token_id": None for meaning in MEANINGS})


def find(manifest: Manifest, base: Path, requested: str | None, *, vocabulary: int, max_length: int) -> TokenizerFiles:
    """Return the files for a checkpoint's run. `requested`: a tokenizer.json, or none; `base`: base weights.

    Raises CheckpointError or DataError, saying what to do, if they cannot be found.
    """
    if requested == NONE:
        return TokenizerFiles(NONE)
    parts = manifest.data.split("+")
    label = parts[1] if len(parts) == 3 else ""
    if label == BYTES and requested is None:
        return _byte_files(max_length)
    return _files_of(_find_tokenizer(label, requested, manifest, base), vocabulary, max_length)


def _byte_files(max_length: int) -> TokenizerFiles:
    settings = {**_settings(max_length), **byte_tokenizer.settings()}
    contents = {TOKENIZER: byte_tokenizer.content(), SETTINGS: _json(settings)}
    return TokenizerFiles(BYTES, contents, {**TokenizerFiles(BYTES).ids, "eos_token_id": END_OF_BYTES})


def _find_tokenizer(label: str, requested: str | None, manifest: Manifest, base: Path) -> Path:
    """Return the path of the tokenizer.json that the run's tokens were made with."""
    if requested is not None:
        path = Path(requested).expanduser()
        if label and not _matches_label(path, label):
            raise CheckpointError(f"its tokens were made with {label}, and --tokenizer {path} is another file")
        return path
    candidates = list(dict.fromkeys(_candidates(manifest, base)))
    if found := next((path for path in candidates if label and _matches_label(path, label)), None):
        return found
    searched = f", which is no longer at {' or '.join(map(str, candidates))}" if candidates else ""
    raise CheckpointError(
        f"its tokens were made with {label or 'an unknown tokenizer'}{searched}. Name that tokenizer.json: --tokenizer "
        f"FILE; or write --tokenizer {NONE} for a folder without one"
    )


def _candidates(manifest: Manifest, base: Path) -> Iterator[Path]:
    """Yield where it may be: first with the initial weights, whose folder has the most companion files."""
    _, options = recipe_of(manifest)
    if (weights := str(options.get("from_weights") or NONE)) != NONE:
        yield Path(os.path.expanduser(weights[:MAX_PATH_CHARACTERS])) / TOKENIZER
        yield base / TOKENIZER
    if (configured := str(options.get("tokenizer") or "")).startswith(("/", "~")):
        yield Path(os.path.expanduser(configured[:MAX_PATH_CHARACTERS]))


def _matches_label(path: Path, label: str) -> bool:
    """Return whether a file is the tokenizer with this label; only the digest counts."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest()[:8] == label.rpartition("-")[2]
    except (OSError, ValueError):  # missing, or an invalid name
        return False


def _files_of(path: Path, vocabulary: int, max_length: int) -> TokenizerFiles:
    tokenizer = HuggingFaceTokenizer(path)
    if tokenizer.id.vocabulary > vocabulary:
        raise CheckpointError(f"{path} has {tokenizer.id.vocabulary} tokens, and the model {vocabulary}. Name its own")
    folder, companions = path.parent, dict(_companions(path))
    contents = {
        TOKENIZER: path.read_bytes(),
        **{name: companions[name] for name in TOKENIZER_COMPANIONS if name in companions},
    }
    settings = _object(folder / SETTINGS, companions)
    _check_added(folder / SETTINGS, settings, vocabulary)
    if "tokenizer_class" not in settings:
        texts = {name: _text(token) for name, token in _object(folder / SPECIAL, companions).items()}
        special = {name: text for name, text in texts.items() if text is not None}
        contents[SETTINGS] = _json({**_settings(max_length), **_end(tokenizer), **special, **settings})
    ids: dict[str, Any] = _ids(json.loads(contents[SETTINGS]), tokenizer)
    model = _object(folder / CONFIG, companions)
    if not model:  # not a model's folder: its generation settings may not be for this tokenizer
        contents.pop(GENERATION, None)
    ids |= {name: model[name] for name in ids if name in model}
    return TokenizerFiles(tokenizer.id.label, contents, ids)


def _settings(max_length: int) -> dict[str, Any]:
    """Return basic settings.

    Without input names transformers 4 adds token types, which a Llama's `generate` refuses.
    """
    names = ["input_ids", "attention_mask"]
    settings = {"tokenizer_class": CLASS, "model_input_names": names, "model_max_length": max_length}
    return {**settings, "clean_up_tokenization_spaces": False}


def _end(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """Return the settings of the end-of-document token; a new token if the file has none."""
    end = tokenizer.id.end_of_document
    if (text := tokenizer.text_of(end)) is not None:
        return {"eos_token": text}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {str(end): {"content": byte_tokenizer.END, "special": True, **flags}}
    return {"eos_token": byte_tokenizer.END, "added_tokens_decoder": added}


def _ids(settings: Mapping[str, Any], tokenizer: HuggingFaceTokenizer) -> dict[str, int | None]:
    """Return the ids of the tokens that the settings name."""
    added = settings.get("added_tokens_decoder")
    by_text = {_text(entry): int(number) for number, entry in (added or {}).items()}

    def number_of(meaning: str) -> int | None:
        text = _text(settings.get(f"{meaning}_token"))
        return None if text is None else by_text.get(text, tokenizer.number_of(text))

    return {f"{meaning}_token_id": number_of(meaning) for meaning in MEANINGS}


def _text(token: Any) -> str | None:
    """Return the text of a token, which is given as text or as an object with further properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _check_added(path: Path, settings: Mapping[str, Any], rows: int) -> None:
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(str(number).isdecimal() for number in added):
        raise DataError(f"{path} has added_tokens_decoder, but not as tokens by number. Correct it.")
    if beyond := next((number for number in added if int(number) >= rows), None):
        message = f"{path} adds {_text(added[beyond])!r:.100} as token {beyond}, but the model has {rows}."
        raise DataError(f"{message} Remove it there, or train with [run.language] vocabulary = {int(beyond) + 1}.")


def _companions(tokenizer: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files next to a tokenizer.json by name.

    A link may lead to a file of the same owner only, as in Hugging Face's cache: a link that somebody else placed
    there must not export another person's file.
    """
    owner = os.stat(tokenizer).st_uid
    for name in (*TOKENIZER_COMPANIONS, CONFIG):
        path = tokenizer.parent / name
        try:
            handle, is_link = _open_link(path)
        except FileNotFoundError:
            continue
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                continue
            if is_link and status.st_uid != owner:
                raise DataError(f"{path} links to a file of another user. Put a copy there, or remove it.")
            yield name, file.read()


def _open_link(path: Path) -> tuple[int, bool]:
    """Open a file; also return whether its name is a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW), False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return os.open(path, flags), True


def _object(path: Path, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the content of one of these files; {} if it is missing."""
    if path.name not in contents:
        return {}
    try:
        content = json.loads(contents[path.name].decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}). Correct or remove it.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object. Correct or remove it.")
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
