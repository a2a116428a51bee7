"""Training a SentencePiece tokenizer on JSON lines."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.data.json_lines import read_chunks, texts_of_chunk
from megalite.errors import DataError
from megalite.files import write_atomically

# As Llama's tokenizers have them.
UNKNOWN, BEGINNING, END_OF_DOCUMENT = 0, 1, 2


def train_tokenizer(
    inputs: Sequence[str],
    json_keys: Sequence[str],
    output_prefix: str,
    vocab_size: int,
    model_type: str = "bpe",
    num_threads: int = 1,
) -> int:
    """Train a model and write `{output_prefix}.model` and `.vocab`.

    Nothing of a text is lost in it: spaces and line ends are kept, and bytes stand for characters it does not know.
    The same input gives the same files at one thread.

    Args:
        inputs: files of one JSON object a line; those that end in .gz are decompressed.
        json_keys: the fields of a line to train on.
        output_prefix: where to write.
        vocab_size: pieces of the model, with its special ones.
        model_type: "bpe" or "unigram".
        num_threads: threads that train.

    Returns:
        The number of pieces.

    Raises:
        DataError: a file cannot be read or written, or the text does not suit the vocabulary's size.
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


def _lines(inputs: Sequence[str], keys: Sequence[str], interruptions: list[BaseException]) -> Iterator[str]:
    """The lines of the texts, with their ends: whole files would be beyond the trainer's limit, and its patience.

    The trainer turns whatever is raised here, Ctrl-C too, into a RuntimeError; `interruptions` keeps it as it was.
    """
    try:
        for chunk in read_chunks(inputs):
            for _, texts in texts_of_chunk(chunk, keys):
                for text in texts:
                    yield from text.splitlines(keepends=True)
    except BaseException as error:
        interruptions.append(error)
        raise


def _explain(error: str, inputs: Sequence[str], vocab_size: int) -> str:
    """What to change, from what the trainer says."""
    where = ", ".join(inputs)
    if most := re.search(r"too high .*<= (\d+)", error):
        return f"{where}: too little text for --vocab-size {vocab_size}; at most {most[1]} with this text"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"--vocab-size {vocab_size} is too small: the bytes and characters of {where} alone need {least[1]}"
    if "!sentences_.empty()" in error:
        return f"{where}: there is no text to train on"
    return f"{where}: SentencePiece cannot train on this text: {error}"
