"""Vocabulary of words whose template puts one token before a document and one after it."""

from __future__ import annotations

from pathlib import Path

import tokenizers

VOCABULARY = {"<s>": 0, "</s>": 1, "0": 2, "a": 3, "b": 4}


def write_template_tokenizer(folder: Path) -> Path:
    """Write its tokenizer.json into the folder."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    template = tokenizers.processors.TemplateProcessing
    tokenizer.post_processor = template(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
