"""The training engine; needs torch, numpy, pydantic, tokenizers and safetensors only."""
