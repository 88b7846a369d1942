"""Tensors by the kind of layer that they belong to, for a summary that a person can read."""

from __future__ import annotations

import re
from typing import Final

GROUPS: Final = (
    ("vision", r"(^|\.)visual\."),
    ("MTP", r"^mtp\."),
    ("attention", r"\.self_attn\.[qkvo]_proj\."),
    ("linear attention", r"\.linear_attn\.(?!norm\.)"),
    ("experts", r"\.mlp\.experts\."),
    ("shared experts", r"\.mlp\.shared_expert"),
    ("routers", r"\.mlp\.gate\."),
    ("MLP", r"\.mlp\."),
    ("norms", r"norm"),
    ("embeddings and head", r"(embed_tokens|lm_head)\."),
)
"""Each group's name and what is in its tensors' names; the first that matches counts."""
OTHER: Final = "other"
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in GROUPS)


def group_of(tensor: str) -> str:
    return next((name for name, pattern in _PATTERNS if pattern.search(tensor)), OTHER)


def group_order(group: str) -> int:
    """Where a group stands in a summary."""
    names = [name for name, _ in GROUPS]
    return names.index(group) if group in names else len(names)
