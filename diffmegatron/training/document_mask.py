"""Whether attention stays within a document, where a recipe leaves that to its sources."""

from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.training.monitoring.progress import say


def decide_document_mask(recipe: Recipe) -> Recipe:
    """Return the recipe with ``data.reset_attention_mask`` decided where it is left open.

    Attention then stays within a document if sequences are packed and a source has conversations
    or instructions: beside others a response learns to copy from them, which it cannot do where
    the model is used. Rank 0 says so.

    Raises:
        UserError: the manifest of a source cannot be read.
    """
    data = recipe.data
    if data.reset_attention_mask is not None:
        return recipe
    conversations = [
        source.path
        for source in data.sources
        if data.packing != "none" and read_manifest(source.path).is_fine_tuning
    ]
    if conversations and read_launch().rank == 0:
        say(
            f"attention stays within a document, as {', '.join(conversations)} has conversations "
            "that share sequences; data.reset_attention_mask=false lets them see each other"
        )
    decided = data.model_copy(update={"reset_attention_mask": bool(conversations)})
    return recipe.model_copy(update={"data": decided})
