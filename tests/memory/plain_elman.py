"""The E1 model with its cell as a plain loop: `plain_elman:build`."""

from sweep.config.models import MODEL_PRESETS, ElmanSettings
from sweep.models.elman import Elman


def build(vocabulary, context):
    sizes = {"name": "elman", "vocabulary": vocabulary, "context": context}
    settings = ElmanSettings(**{**dict(MODEL_PRESETS["elman"]), **sizes})
    return Elman(settings, 0, is_fused=False)
