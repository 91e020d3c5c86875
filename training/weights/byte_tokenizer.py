"""Our byte vocabulary as a Hugging Face tokenizer.json: token n is byte n of the text's UTF-8.

Byte-level BPE without merges. Bytes are represented by GPT-2's letters for them; 255, which occurs in no UTF-8 text,
ends a document.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from training.corpus.tokenizer import END_OF_BYTES

END = "<|endoftext|>"


def content() -> bytes:
    """Return the file's content, which is always the same."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters()) if byte != END_OF_BYTES}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": END_OF_BYTES, "content": END, "special": True}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**vocabulary, END: END_OF_BYTES}, "merges": []},
    }
    return json.dumps(document, indent=1).encode()


def sha256() -> str:
    """Return the digest by which such a file is recognised."""
    return hashlib.sha256(content()).hexdigest()


def settings() -> dict[str, Any]:
    """Return tokenizer_config.json: text that contains the end token's name is encoded as bytes, as in training."""
    return {"eos_token": END, "split_special_tokens": True}


def _letters() -> list[str]:
    """Return GPT-2's letter of each byte: the byte's own if it is visible, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]
