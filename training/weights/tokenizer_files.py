"""The tokenizer's files that go with an exported model, and which tokens mean the beginning, the end and nothing.

A tokenizer.json is found where the run had it, known by the digest that the checkpoint's data are named with, and goes
along byte for byte with what lies beside it. A run on bytes has one written for it.
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

from training.config.choices import PATH_LETTERS
from training.corpus.errors import DataError
from training.corpus.tokenizer import BYTES, END_OF_BYTES, HuggingFace
from training.manifest import CheckpointError, Manifest
from training.weights import byte_tokenizer
from training.weights.export import recipe_of
from training.weights.opening import BESIDE_TOKENIZER, CONFIG, GENERATION, TOKENIZER

NONE = "none"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
CLASS = "PreTrainedTokenizerFast"
"""Reads a tokenizer.json as it is. Where no class is named, a Llama's is taken, which makes its own of it."""
MEANINGS = ("bos", "eos", "pad")
MOST_BYTES = 2**30
"""The largest tokenizer.json that is looked at."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What is written, by its name; and the ids that the model's config.json says."""

    name: str
    contents: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=lambda: {f"{meaning}_token_id": None for meaning in MEANINGS})


def find(manifest: Manifest, base: Path, asked: str | None, *, rows: int, longest: int) -> TokenizerFiles:
    """The files of a checkpoint's run. `asked`: a tokenizer.json, or none; `base`: where weights beside adapters are.

    CheckpointError or DataError where there are none any more, with what to do.
    """
    if asked == NONE:
        return TokenizerFiles(NONE)
    parts = manifest.data.split("+")
    label = parts[1] if len(parts) == 3 else ""
    if label == BYTES and asked is None:
        return _of_bytes(longest)
    return _of_file(_known(label, asked, manifest, base), rows, longest)


def _of_bytes(longest: int) -> TokenizerFiles:
    settings = {**_settings(longest), **byte_tokenizer.settings()}
    contents = {TOKENIZER: byte_tokenizer.content(), SETTINGS: _json(settings)}
    return TokenizerFiles(BYTES, contents, {**TokenizerFiles(BYTES).ids, "eos_token_id": END_OF_BYTES})


def _known(label: str, asked: str | None, manifest: Manifest, base: Path) -> Path:
    """The tokenizer.json that the run's tokens were made with."""
    if asked is not None:
        path = Path(asked).expanduser()
        if label and not _is(path, label):
            raise CheckpointError(f"its tokens were made with {label}, and --tokenizer {path} is another file")
        return path
    places = list(dict.fromkeys(_places(manifest, base)))
    if found := next((path for path in places if label and _is(path, label)), None):
        return found
    looked = f", which is not at {' or '.join(map(str, places))} any more" if places else ""
    raise CheckpointError(
        f"its tokens were made with {label or 'what it does not tell'}{looked}. Name that tokenizer.json: --tokenizer "
        f"FILE; or write --tokenizer {NONE} for a folder without"
    )


def _places(manifest: Manifest, base: Path) -> Iterator[Path]:
    """Where it may lie. First beside the weights that the run began with: there is most beside it."""
    _, options = recipe_of(manifest)
    if (weights := str(options.get("from_weights") or NONE)) != NONE:
        yield Path(os.path.expanduser(weights[:PATH_LETTERS])) / TOKENIZER
        yield base / TOKENIZER
    if (named := str(options.get("tokenizer") or "")).startswith(("/", "~")):
        yield Path(os.path.expanduser(named[:PATH_LETTERS]))


def _is(path: Path, label: str) -> bool:
    """Whether a file is the tokenizer of this label, of which the digest alone counts."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest()[:8] == label.rpartition("-")[2]
    except (OSError, ValueError):  # there is none, or its name is no file's
        return False


def _of_file(path: Path, rows: int, longest: int) -> TokenizerFiles:
    tokenizer = HuggingFace(path)
    if tokenizer.id.vocabulary > rows:
        raise CheckpointError(f"{path} has {tokenizer.id.vocabulary} tokens, and the model {rows}. Name its own")
    folder, beside = path.parent, dict(_beside(path))
    contents = {TOKENIZER: path.read_bytes(), **{name: beside[name] for name in BESIDE_TOKENIZER if name in beside}}
    settings = _object(folder / SETTINGS, beside)
    _check_added(folder / SETTINGS, settings, rows)
    if "tokenizer_class" not in settings:
        told = {name: _text(token) for name, token in _object(folder / SPECIAL, beside).items()}
        special = {name: text for name, text in told.items() if text is not None}
        contents[SETTINGS] = _json({**_settings(longest), **_end(tokenizer), **special, **settings})
    ids: dict[str, Any] = _ids(json.loads(contents[SETTINGS]), tokenizer)
    model = _object(folder / CONFIG, beside)
    if not model:  # nobody's folder: what it says of generating is not of this tokenizer
        contents.pop(GENERATION, None)
    ids |= {name: model[name] for name in ids if name in model}
    return TokenizerFiles(tokenizer.id.label, contents, ids)


def _settings(longest: int) -> dict[str, Any]:
    """The settings. Without the names transformers 4 gives token types, too, which a Llama's `generate` refuses."""
    names = ["input_ids", "attention_mask"]
    about = {"tokenizer_class": CLASS, "model_input_names": names, "model_max_length": longest}
    return {**about, "clean_up_tokenization_spaces": False}


def _end(tokenizer: HuggingFace) -> dict[str, Any]:
    """What ends a document, as tokenizer_config.json has it; a token of its own where the file has none."""
    end = tokenizer.id.end_of_document
    if (text := tokenizer.text_of(end)) is not None:
        return {"eos_token": text}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {str(end): {"content": byte_tokenizer.END, "special": True, **flags}}
    return {"eos_token": byte_tokenizer.END, "added_tokens_decoder": added}


def _ids(settings: Mapping[str, Any], tokenizer: HuggingFace) -> dict[str, int | None]:
    """The ids of the tokens that the settings name."""
    added = settings.get("added_tokens_decoder")
    by_text = {_text(about): int(number) for number, about in (added or {}).items()}

    def number_of(meaning: str) -> int | None:
        text = _text(settings.get(f"{meaning}_token"))
        return None if text is None else by_text.get(text, tokenizer.number_of(text))

    return {f"{meaning}_token_id": number_of(meaning) for meaning in MEANINGS}


def _text(token: Any) -> str | None:
    """The text of a token, which is told by that alone, or with how it is found."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _check_added(path: Path, settings: Mapping[str, Any], rows: int) -> None:
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(str(number).isdecimal() for number in added):
        raise DataError(f"{path} has added_tokens_decoder, but not as tokens by number. Mend it.")
    if beyond := next((number for number in added if int(number) >= rows), None):
        message = f"{path} adds {_text(added[beyond])!r:.100} as token {beyond}, but the model has {rows}."
        raise DataError(f"{message} Take it out there, or train with [run.language] vocabulary = {int(beyond) + 1}.")


def _beside(tokenizer: Path) -> Iterator[tuple[str, bytes]]:
    """The files that lie beside a tokenizer.json, by name. A link may lead to files of its owner's alone, as those of
    Hugging Face's cache do: what somebody else linked there must not go along with who exports."""
    owner = os.stat(tokenizer).st_uid
    for name in (*BESIDE_TOKENIZER, CONFIG):
        path = tokenizer.parent / name
        try:
            handle, is_link = _opened(path)
        except FileNotFoundError:
            continue
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
                continue
            if is_link and about.st_uid != owner:
                raise DataError(f"{path} is a link to a file of somebody else's. Put a copy there, or remove it.")
            yield name, file.read()


def _opened(path: Path) -> tuple[int, bool]:
    """The file, and whether its name is a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW), False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return os.open(path, flags), True


def _object(path: Path, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """What a file of these says; empty where there is none."""
    if path.name not in contents:
        return {}
    try:
        found = json.loads(contents[path.name].decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}). Mend or remove it.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is no JSON object. Mend or remove it.")
    return found


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
