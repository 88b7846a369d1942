"""Talking to a running server."""
