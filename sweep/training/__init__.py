"""The training engine: one loop, one step, checkpoints; `python -m sweep.training TRIAL_FOLDER`.

Needs torch, numpy, pydantic, tokenizers and safetensors only.
"""
