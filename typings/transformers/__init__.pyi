"""What transformers exports, unread: looking for one of its names pyright would parse three thousand files of models.

Submodules (`transformers.utils` and others) are read as they are."""

from typing import Any

def __getattr__(name: str) -> Any: ...
