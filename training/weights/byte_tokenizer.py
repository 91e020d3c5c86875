"""Our byte vocabulary as a tokenizer.json of Hugging Face's: token n is byte n of the text's UTF-8.

Byte-level BPE without a merge. Bytes go by the letters that GPT-2 has for them; 255, which is in no UTF-8 text, is the
end of a document.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from training.corpus.tokenizer import END_OF_BYTES

END = "<|endoftext|>"


def content() -> bytes:
    """The file, always the same."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters()) if byte != END_OF_BYTES}
    plainly = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": END_OF_BYTES, "content": END, "special": True}
    about: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
        "normalizer": None,
        "pre_tokenizer": plainly,
        "post_processor": None,
        "decoder": plainly,
        "model": {"type": "BPE", "vocab": {**vocabulary, END: END_OF_BYTES}, "merges": []},
    }
    return json.dumps(about, indent=1).encode()


def sha256() -> str:
    """The digest by which such a file is known again."""
    return hashlib.sha256(content()).hexdigest()


def settings() -> dict[str, Any]:
    """What tokenizer_config.json says: a text that holds the end's name is bytes, too, as it was in training."""
    return {"eos_token": END, "split_special_tokens": True}


def _letters() -> list[str]:
    """GPT-2's letter of each byte: its own where it can be seen, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]
