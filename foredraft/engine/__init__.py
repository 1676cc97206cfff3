"""One causal language model behind slots of KV cache and a ragged batched forward."""
