"""gRPC's own retries, for the calls that only ask: generating is never tried again behind the caller's back."""

import json

_METHODS = {
    "foredraft.v1.GenerationService": ("GetModel", "Tokenize", "Detokenize"),
    "foredraft.v1.TargetService": ("GetModel", "ListVocabulary"),
    "foredraft.v1.DraftService": ("GetModel", "ListVocabulary"),
}

RETRY = (
    "grpc.service_config",
    json.dumps(
        {
            "methodConfig": [
                {
                    "name": [{"service": s, "method": m} for s, methods in _METHODS.items() for m in methods],
                    "retryPolicy": {
                        "maxAttempts": 3,
                        "initialBackoff": "0.1s",
                        "maxBackoff": "1s",
                        "backoffMultiplier": 3,
                        "retryableStatusCodes": ["UNAVAILABLE"],
                    },
                }
            ]
        }
    ),
)
"""A channel option: three attempts, over less than a second, while a server is away."""
