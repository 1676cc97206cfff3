"""Makes a draft for a target: prune it, let it write training text, and train the draft on its distributions."""
