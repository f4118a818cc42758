"""Choice of ``data.reset_attention_mask`` for recipes that do not set it."""

from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.training.monitoring.progress import print_line


def decide_document_mask(recipe: Recipe, *, prints: bool = True) -> Recipe:
    """Return the recipe with ``data.reset_attention_mask`` set.

    The default is true if sequences can contain several documents and a source has conversations. A
    response could otherwise learn to copy from unrelated conversations, which inference does not
    have.

    Args:
        prints: whether this rank prints a message if the default is true.
    """
    data = recipe.data
    if data.reset_attention_mask is not None:
        return recipe
    conversations = [
        source.path
        for source in data.sources
        if data.packing != "none" and read_manifest(source.path).is_fine_tuning
    ]
    if conversations and prints:
        print_line(
            f"attention stays within a document, because {', '.join(conversations)} has "
            "conversations that share sequences; set data.reset_attention_mask=false to let "
            "conversations attend to each other"
        )
    decided = data.model_copy(update={"reset_attention_mask": bool(conversations)})
    return recipe.model_copy(update={"data": decided})
