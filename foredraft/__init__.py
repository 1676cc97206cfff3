"""Speculative decoding for large language models as gRPC services."""
