"""Token files that are written document by document."""

from __future__ import annotations

import numpy as np

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter


def add_document(
    writer: IndexedDatasetWriter, tokens: np.ndarray | list[int], lengths: list[int] | None = None
) -> None:
    """Add a document of one sequence, or of sequences with these lengths; of no sequence if it has no tokens."""
    tokens = np.asarray(tokens)
    sequences = np.array([len(tokens)] if lengths is None and len(tokens) else lengths or [], dtype=np.int64)
    writer.add_documents(tokens, sequences, np.array([len(sequences)]))
