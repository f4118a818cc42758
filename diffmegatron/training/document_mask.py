"""Choice of ``data.reset_attention_mask`` from the data, for recipes that do not set it."""

from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.training.monitoring.progress import print_line


def decide_document_mask(recipe: Recipe, *, prints: bool = True) -> Recipe:
    """Return the recipe with ``data.reset_attention_mask`` set.

    A value in the recipe is kept. If the recipe has none, the value becomes true (attention stays
    within a document) if both of these conditions hold, and false otherwise:

    1. Sequences can contain several documents (``data.packing`` is not ``none``).
    2. At least one source (corpus) is for fine-tuning, with conversations or instructions.

    Without the mask, a response could attend to unrelated conversations in the same sequence and
    learn to copy from them. At inference there are no such conversations.

    Args:
        recipe: recipe of the run.
        prints: whether this rank prints a message if it decides to set the value to true.

    Raises:
        UserError: If the manifest of a source cannot be read.
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
