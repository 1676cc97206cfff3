"""Generated from protos/foredraft/v1 by tools/generate_stubs.py."""
