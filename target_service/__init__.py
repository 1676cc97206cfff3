"""The target service: verifies draft tokens and decides the final text."""
