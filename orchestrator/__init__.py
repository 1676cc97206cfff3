"""The orchestrator: the decode loop, the generation API and its client."""
