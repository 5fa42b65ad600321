"""What transformers exports, unread: for one of its names pyright would read the files of all its models.

Submodules are read as they are (`py.typed` says that this is a part)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
