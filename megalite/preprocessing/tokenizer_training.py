"""Training of tokenizers on a corpus: SentencePiece models, and byte-level BPE for Hugging Face's `tokenizers`."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.data.corpus import find_inputs, read_chunks
from megalite.data.documents import BadRecord, read_documents
from megalite.data.optional import optional_import
from megalite.data.tokenizers.byte_level_bpe import LLAMA3_PATTERN
from megalite.data.tokenizers.library_errors import library_errors
from megalite.errors import DataError

# The ids of Llama's tokenizers.
UNKNOWN, BEGINNING, END_OF_DOCUMENT = 0, 1, 2
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    inputs: Sequence[str],
    json_keys: Sequence[str],
    output_prefix: str,
    vocab_size: int,
    model_type: str = "bpe",
    num_threads: int = 1,
) -> int:
    """Train a SentencePiece model and write `{output_prefix}.model` and `.vocab`.

    The model encodes every text without loss: it keeps spaces and line ends, and encodes unknown characters as bytes.
    With one thread, the same input gives the same files.

    Args:
        inputs: the corpus, as for `preprocess`.
        json_keys: fields of a record to train on.
        output_prefix: path of the output without the suffix.
        vocab_size: number of pieces of the model, including special pieces.
        model_type: "bpe" or "unigram".
        num_threads: number of threads that train.

    Returns:
        The number of pieces.

    Raises:
        DataError: a file cannot be read, or the vocabulary's size is too large or too small for the text.
    """
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    model = io.BytesIO()
    interruptions: list[BaseException] = []
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(inputs, json_keys, interruptions),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=num_threads,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 20,
            unk_id=UNKNOWN,
            bos_id=BEGINNING,
            eos_id=END_OF_DOCUMENT,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if interruptions:
            raise interruptions[0] from None
        raise DataError(_explain(str(error), inputs, vocab_size)) from error
    processor = SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    write_atomically(Path(f"{output_prefix}.model"), model.getvalue())
    write_atomically(Path(f"{output_prefix}.vocab"), "".join(f"{p}\t{s:g}\n" for p, s in pieces).encode())
    return len(pieces)


def train_byte_level_bpe(
    inputs: Sequence[str], json_keys: Sequence[str], output_prefix: str, vocab_size: int, num_threads: int = 1
) -> int:
    """Train a byte-level BPE and write `{output_prefix}/tokenizer.json` and `tokenizer_config.json`.

    Words are cut as in Llama 3, and every text is encoded without loss. Documents end with <|endoftext|>.

    Args:
        inputs, json_keys, num_threads: as for `train_tokenizer`.
        output_prefix: folder of the output.
        vocab_size: number of tokens: 256 bytes, the end of a document, and the results of merges.

    Returns:
        The number of tokens.

    Raises:
        DataError: a file cannot be read, or there is too little text for the vocabulary's size.
        ConfigurationError: the library is not installed.
    """
    tokenizers = optional_import("tokenizers", "tokenizers", "--model-type byte-level-bpe")
    if vocab_size < 257:
        raise DataError(f"--vocab-size {vocab_size} is too small: the bytes and the end of a document are 257 tokens")
    # The library reads this variable when it starts its first threads.
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with library_errors(f"Hugging Face's tokenizers cannot train on {', '.join(inputs)}"):
        tokenizer.train_from_iterator(_texts(inputs, json_keys), trainer)
    tokens: int = tokenizer.get_vocab_size()
    if tokens < vocab_size:
        where = ", ".join(inputs)
        raise DataError(f"{where}: too little text for --vocab-size {vocab_size}; at most {tokens} with this text")
    folder = Path(output_prefix)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_atomically(folder / "tokenizer_config.json", json.dumps({"eos_token": END_OF_TEXT}).encode())
    return tokens


def _texts(inputs: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    for chunk in read_chunks(find_inputs(inputs), keys):
        for record in read_documents(chunk, keys):
            if isinstance(record, BadRecord):
                raise record.error()
            for texts in record.texts:
                yield from texts


def _lines(inputs: Sequence[str], keys: Sequence[str], interruptions: list[BaseException]) -> Iterator[str]:
    """Yield the lines of the texts, with line ends: entire texts would be too large and too slow for the trainer.

    The trainer converts any exception raised here, including Ctrl-C, to a RuntimeError; `interruptions` keeps the
    original exception.
    """
    try:
        for text in _texts(inputs, keys):
            yield from text.splitlines(keepends=True)
    except BaseException as error:
        interruptions.append(error)
        raise


def _explain(error: str, inputs: Sequence[str], vocab_size: int) -> str:
    """Return a message that says what to change, from the trainer's error."""
    where = ", ".join(inputs)
    if most := re.search(r"too high .*<= (\d+)", error):
        return f"{where}: too little text for --vocab-size {vocab_size}; at most {most[1]} with this text"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"--vocab-size {vocab_size} is too small: the bytes and characters of {where} alone need {least[1]}"
    if "!sentences_.empty()" in error:
        return f"{where}: there is no text to train on"
    return f"{where}: SentencePiece cannot train on this text: {error}"
