"""The E1 model with its cell as a plain loop: `plain_elman:build`."""

from sweep.config.models import MODEL_PRESETS, ElmanSettings
from sweep.models.elman import Elman


def build(vocabulary, context):
    sizes = {**MODEL_PRESETS["elman"], "vocabulary": vocabulary, "context": context}
    return Elman(ElmanSettings(name="elman", **sizes), 0, is_fused=False)
