"""The draft service: proposes tokens and prepares answers to likely verdicts."""
