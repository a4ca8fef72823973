"""Data: what it is, and its tokens.

`identify_data` says what goes into trial ids, and is all that planning needs. `prepare_data` makes
the tokens, once. `SequenceStream` says in which order training sees them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweep.data.identity import identify_data as identify_data
    from sweep.data.sources import check_text_length as check_text_length
    from sweep.data.stream import SequenceStream as SequenceStream
    from sweep.data.stream import document_of_targets as document_of_targets
    from sweep.data.stream import gather as gather
    from sweep.data.synthetic import entropy_per_document as entropy_per_document
    from sweep.data.tokenizer import check_tokenizer as check_tokenizer
    from sweep.data.tokens import TokenizedText as TokenizedText
    from sweep.data.tokens import describe_data as describe_data
    from sweep.data.tokens import find_prepared as find_prepared
    from sweep.data.tokens import prepare_data as prepare_data

_MODULES = {
    "SequenceStream": "stream",
    "TokenizedText": "tokens",
    "check_text_length": "sources",
    "check_tokenizer": "tokenizer",
    "describe_data": "tokens",
    "document_of_targets": "stream",
    "entropy_per_document": "synthetic",
    "find_prepared": "tokens",
    "gather": "stream",
    "identify_data": "identity",
    "prepare_data": "tokens",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
