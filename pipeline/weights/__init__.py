"""Weights on disk: safetensors headers and what must hold for a server to load them. No torch."""
