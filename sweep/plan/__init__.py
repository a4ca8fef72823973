"""From a token budget to steps, warmup, accumulation and trial ids: pure arithmetic."""
