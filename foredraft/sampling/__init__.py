"""Sampling as pure functions: noise, warpers, draft proposals and verification."""
