"""The training engine: one loop, one step, checkpoints; `python -m sweep.training TRIAL_FOLDER`.

Needs torch, numpy, pydantic, tokenizers and safetensors only.
"""

import os

# Read by OpenMP when torch is first imported. Threads that spin at barriers for long slow a step
# 2 to 10 times while anything else uses a core, and gain nothing measurable on a free machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
