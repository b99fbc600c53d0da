"""Text -> batches: sources, a WordPiece tokenizer, windows of any length, masks that depend on their keys alone."""

from locant.data.corpora import TextSource, read_text
from locant.data.corpus import Corpus, load_corpus
from locant.data.document import Document
from locant.data.mlm import (
    EVALUATION_EPOCH,
    MaskingConfig,
    MlmCollator,
    MlmDataset,
    ScheduledDataset,
    Vocabulary,
    mask_tokens,
    order,
)
from locant.data.parallel import SentencePairs, read_pairs
from locant.data.tokenizer import TokenizerConfig, build_tokenizer
from locant.data.windows import TokenStream, Windows, encode, make_pieces, make_windows, split_documents

__all__ = [
    "EVALUATION_EPOCH",
    "Corpus",
    "Document",
    "MaskingConfig",
    "MlmCollator",
    "MlmDataset",
    "ScheduledDataset",
    "SentencePairs",
    "TextSource",
    "TokenStream",
    "TokenizerConfig",
    "Vocabulary",
    "Windows",
    "build_tokenizer",
    "encode",
    "load_corpus",
    "make_pieces",
    "make_windows",
    "mask_tokens",
    "order",
    "read_pairs",
    "read_text",
    "split_documents",
]
